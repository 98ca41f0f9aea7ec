"""Errors of vLLM in the terms of a recipe, and of `actors.errors`."""

from collections.abc import Iterator
from contextlib import contextmanager

from actors.engines.vllm_output import cause_in, died, memory_problem
from actors.errors import EngineDied
from headway.errors import HeadwayError, InputError

_WRONG_PATH = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)


def start_error(model_path: str, error: Exception, printed: str) -> HeadwayError:
    """Return the error of an engine that did not start to serve a model.

    `error` is what vLLM raised, `printed` the output of its processes.
    """
    from vllm.platforms import current_platform

    problem = memory_problem(f"{printed}\n{error}", cpu=current_platform.is_cpu())
    if problem is not None:
        message, permanent = problem
        return (InputError if permanent else EngineDied)(f"model {model_path!r}: {message}")
    if not (isinstance(error, RuntimeError) or _is_of_system(error)):
        return InputError(f"vLLM cannot serve {model_path!r}: {error}")
    return EngineDied(f"vLLM did not start for {model_path!r}: {cause_in(printed) or error}")


def _is_of_system(error: Exception) -> bool:
    """Return True for an error of the system, such as a full disk; a model hub's have no number."""
    return (
        isinstance(error, OSError)
        and error.errno is not None
        and not isinstance(error, _WRONG_PATH)
    )


@contextmanager
def typed_errors() -> Iterator[None]:
    """Translate vLLM's errors into those of `actors.errors`."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

    try:
        yield
    except EngineDeadError as error:
        raise EngineDied(died()) from error
    except (VLLMClientError, ValueError) as error:
        raise InputError(f"vLLM refused a request: {error}") from error
    except EngineGenerateError as error:
        raise HeadwayError(f"vLLM failed a request: {error.__cause__ or error}") from error
