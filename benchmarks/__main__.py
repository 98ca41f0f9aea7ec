"""`python -m benchmarks NAME`: runs a benchmark of the table of `headway bench`."""

import sys
from importlib import import_module

from deploy.cli.bench import BENCHMARKS

if __name__ == "__main__":
    name = sys.argv.pop(1)
    sys.argv[0] = f"headway bench {name}"
    import_module(f"benchmarks.{BENCHMARKS[name]}").STUDY.main()
