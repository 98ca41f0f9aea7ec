"""Section `[deploy]` of a recipe: where a run lives, its Ray cluster, and its deadlines."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from headway.recipe_section import MAY_CHANGE, ResumeRule, Section

LOCATED = ResumeRule("the run is where its folder is: move the folder, and name it")
LINKED = ResumeRule("the run's folder has a link to it: move what is there, and set the link anew")
STALL_FACTOR = 3
"""A run in which nothing moves for this many times `deploy.watchdog_seconds` is ended."""


class Placement(Section):
    """The nodes of one role."""

    labels: dict[str, str] = Field(default={})
    """Labels that a node must have, as given to `ray start --labels`. Ray itself labels nodes with
    "ray.io/accelerator-type"."""
    resources: dict[str, float] = Field(default={})
    """Custom resources that each process reserves, as given to `ray start --resources`; CPUs and
    GPUs are settings of the role."""


class Placements(Section):
    """Section `[deploy.placement]`: the nodes of each role.

    A role without an entry stays on the driver's node, or is spread over all nodes where its
    weight transport allows it.
    """

    learner: Placement | None = Field(default=None)
    """A learner on other nodes than the driver needs `deploy.checkpoint_dir` on a disk that they
    share."""
    actors: Placement | None = Field(default=None)
    reward_model: Placement | None = Field(default=None)


class NodeConfig(Section):
    """Section `[deploy.node]`: what each node has, for the prediction of memory and updates.

    GPUs and memory that are not given are those of this machine if the run would be on it, and else
    not compared. A run on this machine has no more than the machine, whatever is given.
    """

    gpus: int | None = Field(default=None, ge=1)
    """GPUs of a node."""
    gpu_gib: float | None = Field(default=None, gt=0)
    """Memory of a GPU that programs can use: 79 GiB of a card of 80 GB."""
    memory_gib: float | None = Field(default=None, gt=0)
    """Memory of a node."""
    network_gbit: float = Field(default=25.0, gt=0)
    """What the network brings to a node and from it, in Gbit/s, for the time of weight updates."""


class DeployConfig(Section):
    """Section `[deploy]`: folder, cluster, metrics and deadlines of a run."""

    on_resume = MAY_CHANGE

    ray_address: str = Field(default="local", pattern=r"^(local|auto|(ray://)?[^\s/]+:\d+)$")
    """`local` starts a cluster on this machine for the run; else "host:port", or `auto`."""
    placement: Placements = Placements()
    """Nodes of a cluster that the roles of the run work on."""
    node: NodeConfig = NodeConfig()
    """GPUs and memory of a node, which `headway validate` and `headway plan` compare with what the
    run needs."""
    metrics: bool = True
    """Show metrics of every process to Prometheus, which finds them at one address of the run."""
    engine_metrics: bool = False
    """Show some of vLLM's own metrics beside those of each actor (`actors.metrics`). vLLM then
    counts every token of every request, which takes some percent of the actor's process."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of that address, which the command prints. None takes 9464, where the shipped
    prometheus.yml looks, or a free one if that is in use; 0 takes a free one."""
    metrics_host: str = Field(default="127.0.0.1", pattern=r"^[0-9A-Za-z.:-]+$")
    """Address that all of them bind to. The default shows them on their own machine alone; on a
    cluster "0.0.0.0" lets a Prometheus elsewhere reach them, and everybody else who can."""
    metrics_token: bool = False
    """Let only requests read metrics that have the token in the environment variable
    HEADWAY_METRICS_TOKEN, as `Authorization: Bearer …`; /healthz and /readyz need none."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Send the figures of each batch and some rollouts to TensorBoard (files in the run's folder),
    Weights & Biases (offline unless WANDB_MODE = "online") or MLflow (files in the run's folder
    unless MLFLOW_TRACKING_URI is set); each is an extra of the same name."""
    runs_dir: Annotated[Path, LOCATED] = Path("runs")
    """Folder of run folders, relative to where the command runs."""
    code_dir: Path | None = None
    """Folder whose modules and relative files a recipe may name, besides the working directory;
    None takes that of the recipe. Nodes of another cluster need it too."""
    checkpoint_dir: Annotated[Path | None, LINKED] = None
    """Folder in which one for the checkpoints of the run is made, on another disk or shared by all
    nodes of the learner; the run's folder has a link to it. None: they are in the run's folder."""
    checkpoint_address: str | None = Field(default=None, pattern=r"^[a-z][a-z0-9+.-]*://\S+$")
    """Address of a folder on an object store, as fsspec has it: s3://bucket/folder, gs://… or
    hf://datasets/OWNER/NAME. Each newest checkpoint is copied to ADDRESS/NAME-ID/, beside training,
    and read back; what the run deletes is deleted there too. It needs the store's package."""
    backup_dir: Annotated[Path | None, LINKED] = None
    """Folder on shared storage in which one for a copy of ledger and journal is made, and for the
    checkpoints, unless `checkpoint_dir` is set. Takes, acknowledgements and checkpoints are in it
    before they are answered, results within `backup_seconds`: after the loss of the node or disk
    with the run's folder, `headway resume` of the copy goes on. None: such a loss is that of the
    run."""
    backup_seconds: float = Field(default=5, gt=0)
    """Time within which results are in `backup_dir`; as much accepted work may be generated again.
    """
    environment: dict[str, str] = Field(default={})
    """Environment variables of every process that the run starts through Ray, such as NCCL_DEBUG or
    HF_HOME; it is no place for secrets."""
    private: bool = True
    """Only you may read the folders that are made: of the run, of its warm start and of its reward
    models. False leaves it to the umask."""
    start_timeout_seconds: float = Field(default=600, gt=0)
    """Deadline for every process to have loaded the model."""
    watchdog_seconds: float = Field(default=300, gt=0)
    """A wait that lasts so long without progress is reported with the stacks of the process that is
    waited for: on the terminal, in `headway top`, in waits.jsonl and by a metric; if that is the
    learner, its ranks are ended and made again. A run in which nothing moves for three times as
    long is ended. It must exceed the first step and the longest rollout; the learner has three
    times its longest step in addition, and the time that the bytes of a checkpoint take at 25 MB/s.
    """
    watchdog_aborts: bool = False
    """End the run at the first such report, after a checkpoint where the learner can save one."""
    checkpoint_seconds: float = Field(default=12, gt=0)
    """Deadline, after an interrupt, for the learner to end its step and save a checkpoint; twice
    the time that the last checkpoint took is added, before the first one the time of its bytes at
    25 MB/s, at most 1,800 s."""
    max_failed_groups: int = Field(default=64, ge=0)
    """Groups that may fail for good among the last `failure_window`, by a reward that raises or a
    prompt that does not fit; one more ends the run with their last error."""
    failure_window: int = Field(default=640, ge=1)
    """Newest groups that `max_failed_groups` is counted in, so that it limits a rate: a long run
    may lose a prompt now and then. `headway requeue` puts failed prompts back."""
    max_restarts: int = Field(default=5, ge=0)
    """Restarts in a row of an actor, the learner, the command itself or another process that dies,
    before the run is ended with its last error. An actor is counted anew once it has finished a
    rollout or worked for 10 minutes, the learner once it has trained a new batch, others after
    either. What fails twice in the same way before it has done any work is not restarted again."""

    @field_validator("runs_dir", "checkpoint_dir", "backup_dir", "code_dir")
    @classmethod
    def _expanded(cls, value: Path | None) -> Path | None:
        return value and value.expanduser()

    @property
    def stall_seconds(self) -> float:
        """Seconds without any progress after which a run is ended."""
        return STALL_FACTOR * self.watchdog_seconds
