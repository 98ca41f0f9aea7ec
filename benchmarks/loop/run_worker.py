"""One measurement of a benchmark in a process of its own, so that Ray ends with it.

python -m benchmarks.loop.run_worker RECIPE.json train|actors|learner [RECORDED_RUN]
"""

import sys
from dataclasses import replace
from pathlib import Path

from benchmarks.loop.async_limits import actors_alone, learner_alone
from deploy.config.run_config import RunConfig
from deploy.errors import DeployError
from deploy.preflight.inputs import load_inputs
from deploy.runtime.console import Terminal
from deploy.session import run
from deploy.storage.run_directory import RunDirectory


def main() -> None:
    recipe, kind, *recorded = sys.argv[1:]
    config = RunConfig.model_validate_json(Path(recipe).read_text())
    inputs = load_inputs(config)
    directory = RunDirectory.of(config)
    directory.create(config, replace=False)
    match kind:
        case "train":  # without evaluations: checkpoints are scored afterwards
            run(config, replace(inputs, evaluations=[]), directory, Terminal())
        case "actors":
            actors_alone(config, inputs, directory)
        case "learner":
            learner_alone(config, inputs, directory, Path(recorded[0]))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    except DeployError as error:
        print(f"headway: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
