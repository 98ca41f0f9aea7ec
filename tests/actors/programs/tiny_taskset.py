"""A taskset of the library verifiers with a harness of its own, which calls a tool once."""

import openai
import verifiers.v1 as vf

__all__ = ["Chat", "Sums"]


class SumData(vf.TaskData):
    answer: str


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.endswith(self.data.answer))

    @vf.reward
    async def asked(self, trace: vf.Trace) -> float:
        return float(len(trace.assistant_messages) > 1)


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for n in range(6):
            data = SumData(prompt=f"{n}+{n}=", answer=str(2 * n))
            yield SumTask(data, self.config.task)


class Chat(vf.Harness):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt_text}]
        for _ in range(2):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            text = answer.choices[0].message.content or ""
            if not text.startswith("["):
                break
            left, _, right = text.strip("[]").partition("+")
            total = str(int(left) + int(right))
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": total}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
