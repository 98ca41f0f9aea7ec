"""The agent as a taskset of the library verifiers, with its harness and its reward.

`environment = "verifiers:products"` plays it. It imports nothing of Headway.
"""

import random
from collections.abc import Iterator
from typing import Any

import openai
import verifiers.v1 as vf

__all__ = ["Calculator", "Products"]


class ProductData(vf.TaskData):
    """The data of a task."""

    answer: str


class ProductTask(vf.Task[ProductData]):
    """A task such as 12*34=, of which the last message is the result."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """Return 1 for the right result."""
        return float(trace.last_reply == f"={self.data.answer}")


class Products(vf.Taskset[ProductTask]):
    """2,000 products of random numbers."""

    def load(self) -> Iterator[ProductTask]:
        """Yield the tasks."""
        generator = random.Random(0)
        for _ in range(2000):
            left, right = generator.randint(10, 999), generator.randint(10, 999)
            data = ProductData(prompt=f"{left}*{right}=", answer=str(left * right))
            yield ProductTask(data, self.config.task)


class Calculator(vf.Harness):
    """Asks the policy, and gives it the product that it writes in brackets, as [12*34]."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, *given: Any) -> vf.ProgramResult:
        """Play a task with the endpoint that the library gives."""
        context, _trace, _runtime, endpoint, secret, _mcp_urls, data = given
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages: list[Any] = [{"role": "user", "content": data.prompt_text}]
        for _ in range(4):
            answer = await client.chat.completions.create(model=context.model, messages=messages)
            text = answer.choices[0].message.content or ""
            left, _, right = text.partition("[")[2].partition("]")[0].partition("*")
            if not (left.isdigit() and right.isdigit()):
                break
            product = {"role": "tool", "tool_call_id": "0", "content": str(int(left) * int(right))}
            messages += [{"role": "assistant", "content": text}, product]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
