"""Manifests and Dockerfiles that ship: their form, and that they fit together and to recipes."""

import re
import shlex
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml
from ray._private.ray_constants import DEFAULT_OBJECT_STORE_MEMORY_PROPORTION
from ray.scripts.scripts import drain_node

from deploy.config.loader import load_recipe
from deploy.driver.actor_fleet import HURRY_SECONDS
from deploy.planner.byte_counts import GIB
from deploy.planner.model_sizes import measure
from deploy.planner.node_memory import Capacity, predict
from deploy.planner.process_memory import total
from headway.metrics import TOKEN_VARIABLE
from tests.deploy.kubernetes_schema import KUSTOMIZATION, manifest

ROOT = Path(__file__).parents[3]
SHIPPED = ROOT / "deploy" / "kubernetes"
KUSTOMIZATIONS = sorted(SHIPPED.glob("*/kustomization.yaml"))
MANIFESTS = sorted(set(SHIPPED.glob("*/*.yaml")) - set(KUSTOMIZATIONS))
DOCKERFILES = sorted((ROOT / "deploy" / "docker").glob("Dockerfile.*"))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def read(path):
    return yaml.safe_load(path.read_text())


CLUSTER = read(SHIPPED / "base" / "raycluster.yaml")
HEAD = CLUSTER["spec"]["headGroupSpec"]
GROUPS = [HEAD, *CLUSTER["spec"]["workerGroupSpecs"]]
PODS = [group["template"]["spec"] for group in GROUPS]
CONTAINERS = [container for pod in PODS for container in pod["containers"]]
"""One a group, in its order."""
ON_HEAD = CONTAINERS[0]
PORTS = {port["name"]: port["containerPort"] for port in ON_HEAD["ports"]}
MONITORING = SHIPPED / "monitoring"


def name_of(path):
    return str(path.relative_to(ROOT / "deploy"))


@pytest.mark.parametrize("path", MANIFESTS, ids=name_of)
def test_a_manifest_has_the_form_of_its_kind(path):
    document = read(path)
    jsonschema.validate(document, manifest(document))


@pytest.mark.parametrize("path", KUSTOMIZATIONS, ids=name_of)
def test_a_kustomization_names_all_files_beside_it(path):
    document = read(path)
    jsonschema.validate(document, KUSTOMIZATION)
    beside = {file.name for file in path.parent.glob("*.yaml")} - {path.name}
    folders = {name for name in document["resources"] if (path.parent / name).is_dir()}
    assert set(document["resources"]) - folders == beside
    assert all((path.parent / name / "kustomization.yaml").is_file() for name in folders)


def test_a_misspelt_key_is_found():
    wrong = {**CLUSTER, "spec": {**CLUSTER["spec"], "workerGroupSpec": []}}
    with pytest.raises(jsonschema.ValidationError, match="workerGroupSpec"):
        jsonschema.validate(wrong, manifest(wrong))


def test_the_cluster_asks_for_a_token_and_no_pod_runs_as_root():
    assert CLUSTER["spec"]["authOptions"] == {"mode": "token"}
    assert all(pod["securityContext"]["runAsNonRoot"] for pod in PODS)


def test_every_container_has_shared_memory_of_its_own_and_probes():
    for pod, container in zip(PODS, CONTAINERS, strict=True):
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
        assert set(mounts.values()) == set(volumes)
        assert {"livenessProbe", "readinessProbe"} <= set(container)


def gib(text):
    return int(text.removesuffix("Gi")) * GIB


ALONE = ("learner.ranks=1", "actors.count=1", "deploy.node.gpus=1")
IN_TWO_PODS = (
    "deploy.ray_address=auto", "weight_sync.transport=object_store",
    "deploy.placement.actors.labels.pool=generate",
)  # fmt: skip
ON_ONE_GPU = ("learner.gpus=0.5", "actors.gpus=0.5", "actors.gpu_memory_utilization=0.4")


def predicted(*settings):
    """Return the parts of the memory of each node of a run of 1.5 billion weights."""
    path = str(ROOT / "tests" / "deploy" / "planner" / "shapes" / "qwen2.5-1.5b")
    config = load_recipe("gsm8k_qwen_8gpu", [f"model.path={path}", *ALONE, *settings])
    return [node.parts for node in predict(config, measure(config, path), Capacity(gpus=1)).nodes]


def test_pods_have_the_memory_that_is_predicted_and_shared_memory_for_versions_and_ray():
    pods = [*PODS[:2], read(SHIPPED / "machine" / "job.yaml")["spec"]["template"]["spec"]]
    needs = [*predicted(*IN_TWO_PODS), *predicted(*ON_ONE_GPU)]
    for pod, parts in zip(pods, needs, strict=True):
        [container], [shared] = pod["containers"], [v for v in pod["volumes"] if "emptyDir" in v]
        resources = container["resources"]
        memory, size = gib(resources["limits"]["memory"]), gib(shared["emptyDir"]["sizeLimit"])
        assert resources["requests"]["memory"] == resources["limits"]["memory"]
        assert 1.1 * total(parts) < memory < 1.5 * total(parts)
        store = DEFAULT_OBJECT_STORE_MEMORY_PROPORTION * memory
        assert parts["published versions"] + store < size < memory


def test_there_is_a_pool_with_and_one_without_gpus():
    gpus = {
        group.get("groupName", "head"): "nvidia.com/gpu" in container["resources"]["limits"]
        for group, container in zip(GROUPS, CONTAINERS, strict=True)
    }
    assert (gpus["generate"], gpus["judge"], len(gpus)) == (True, False, 3)


def test_a_pod_that_ends_drains_its_node_and_leaves_actors_the_time_to_hand_over():
    [generate] = [pod for group, pod in zip(GROUPS, PODS, strict=True)
                  if group.get("groupName") == "generate"]  # fmt: skip
    [container] = generate["containers"]
    [*_, command] = container["lifecycle"]["preStop"]["exec"]["command"]
    drain, wait = command.split("; ")
    program, name, *arguments = shlex.split(drain)
    assert (program, name) == ("ray", drain_node.name)
    given = drain_node.make_context(name, arguments).params
    seconds = int(wait.removeprefix("sleep "))
    assert given["node_id"] is None, "its own"
    assert HURRY_SECONDS < seconds < given["deadline_remaining_seconds"]
    assert given["deadline_remaining_seconds"] < generate["terminationGracePeriodSeconds"]


def test_images_are_those_that_are_built_here_at_this_version():
    document = read(SHIPPED / "base" / "kustomization.yaml")
    tags = {image["name"]: image["newTag"] for image in document["images"]}
    used = {container["image"] for container in CONTAINERS}
    built = {f"headway-{path.suffix[1:]}" for path in DOCKERFILES}
    assert tags == dict.fromkeys(sorted(used), VERSION)
    assert used == built
    for path in DOCKERFILES:
        assert f"headway-{path.suffix[1:]}:{VERSION}" in path.read_text()


def mounted(container):
    return {mount["mountPath"] for mount in container["volumeMounts"]}


def settled(command):
    """Return the recipe of a command of the job."""
    headway, _, recipe, *settings = (part for part in shlex.split(command) if part != "--resume")
    assert (headway, set(settings[::2])) == ("headway", {"--set"})
    return load_recipe(recipe, settings[1::2])


JOB = read(SHIPPED / "job" / "rayjob.yaml")["spec"]
RUN = settled(JOB["entrypoint"].split(" && ")[-1])


def test_the_job_makes_the_warm_start_that_its_run_begins_with():
    known, rest = JOB["entrypoint"].split(" || ")
    first, link, run = (shlex.split(part) for part in rest.split(" && "))
    assert [command[1] for command in (first, link, run)] == ["sft", "-sfn", "run"]
    folder = settled(shlex.join(first)).warm_start.parent
    assert known == f"test -e {folder}", "it is made once"
    assert link == ["ln", "-sfn", str(folder), str(RUN.warm_start.parent)]
    assert all(str(folder.parent) in mounted(container) for container in CONTAINERS)
    stores = [read(SHIPPED / "base" / f"{name}.yaml") for name in ("runs", "models")]
    claims = [v.get("persistentVolumeClaim") for pod in PODS for v in pod["volumes"]]
    named = {claim["claimName"] for claim in claims if claim}
    assert named == {store["metadata"]["name"] for store in stores}


def test_the_job_is_a_valid_run_whose_folder_metrics_and_pools_the_cluster_has():
    assert JOB["clusterSelector"] == {"ray.io/cluster": CLUSTER["metadata"]["name"]}
    assert str(RUN.deploy.runs_dir) in mounted(ON_HEAD)
    assert RUN.deploy.metrics_port == PORTS["headway"]
    assert RUN.deploy.placement.actors.labels in [group["labels"] for group in GROUPS]


def secrets_of(container):
    return {entry["name"]: entry["valueFrom"]["secretKeyRef"] for entry in container["env"]}


def test_the_metrics_of_jobs_are_behind_the_token_that_prometheus_has():
    assert RUN.deploy.metrics_token
    config = read(MONITORING / "scrapeconfig.yaml")["spec"]
    [discovery] = config["httpSDConfigs"]
    expected = {"credentials": secrets_of(ON_HEAD)[TOKEN_VARIABLE]}
    assert config["authorization"] == discovery["authorization"] == expected


def test_the_run_of_one_machine_is_probed_where_it_answers():
    pod = read(SHIPPED / "machine" / "job.yaml")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    *_, command = container["command"]
    config = settled(command[command.index("headway run") :])
    assert config.deploy.metrics_token
    assert TOKEN_VARIABLE in secrets_of(container)
    [port] = container["ports"]
    assert port["containerPort"] == config.deploy.metrics_port
    paths = {
        name: probe["httpGet"]["path"]
        for name, probe in container.items()
        if name.endswith("Probe") and probe["httpGet"]["port"] == port["name"]
    }
    expected = {"startupProbe": "/healthz", "livenessProbe": "/healthz"}
    assert paths == expected | {"readinessProbe": "/readyz"}
    assert str(config.deploy.runs_dir) in mounted(container)


NODE = {"sourceLabels": ["__address__"], "regex": "(.*):[0-9]+", "targetLabel": "node"}


def test_all_metrics_have_the_node_by_which_they_are_joined_and_workers_are_asked_too():
    names = ("scrapeconfig", "servicemonitor", "podmonitor")
    scrape, head, workers = (read(MONITORING / f"{name}.yaml")["spec"] for name in names)
    [service], [pods] = head["endpoints"], workers["podMetricsEndpoints"]
    assert all(monitor["relabelings"] == [NODE] for monitor in (scrape, service, pods))
    kinds = [monitor["selector"]["matchLabels"]["ray.io/node-type"] for monitor in (head, workers)]
    assert kinds == ["head", "worker"]
    for container in CONTAINERS:
        assert pods["port"] in {port["name"] for port in container["ports"]}


def test_the_rules_and_the_dashboard_that_ship_are_those_of_the_manifests():
    folder = ROOT / "deploy" / "monitoring"
    document = read(MONITORING / "prometheusrule.yaml")
    assert document["spec"] == read(folder / "rules.yml")
    document = read(folder / "kustomization.yaml")
    jsonschema.validate(document, KUSTOMIZATION)
    [maps] = document["configMapGenerator"]
    assert all((folder / file).is_file() for file in maps["files"])
    assert document["generatorOptions"]["labels"] == {"grafana_dashboard": "1"}


def test_stacks_may_be_read_in_every_pod():
    for container in CONTAINERS:
        assert container["securityContext"] == {"capabilities": {"add": ["SYS_PTRACE"]}}
    for path in DOCKERFILES:
        assert 'setcap cap_sys_ptrace+ep "$(command -v py-spy)"' in path.read_text()


def test_process_1_reaps_orphans_in_every_pod_and_image():
    assert all(pod["shareProcessNamespace"] for pod in PODS)
    for path in DOCKERFILES:
        assert ("ENTRYPOINT", '["tini", "--"]') in instructions(path)
        assert " tini " in path.read_text()


def test_prometheus_asks_the_head_where_ray_and_runs_show_metrics():
    name = CLUSTER["metadata"]["name"]
    [discovery] = read(MONITORING / "scrapeconfig.yaml")["spec"]["httpSDConfigs"]
    assert discovery["url"] == f"http://{name}-head-svc:{PORTS['headway']}/targets"
    [endpoint] = read(MONITORING / "servicemonitor.yaml")["spec"]["endpoints"]
    assert endpoint["port"] in PORTS


def instructions(path):
    """Instruction and arguments of each line, continuations joined, comments left out."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(None, 1)) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_a_dockerfile_pins_its_base_copies_what_there_is_and_leaves_root(path):
    lines = instructions(path)
    assert lines[0][0] == "FROM"
    assert re.fullmatch(r"[\w./-]+:\d[\w.-]*", lines[0][1])
    known = {"FROM", "RUN", "COPY", "ENV", "WORKDIR", "USER", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in lines} <= known
    for name, arguments in lines:
        if name == "COPY":
            *sources, _ = arguments.split()
            assert all((ROOT / source).exists() for source in sources), arguments
        if name == "RUN" and "pip install" in arguments:
            assert arguments.count("pip install --no-cache-dir") == arguments.count("pip install")
        if name == "RUN" and "apt-get install" in arguments:
            assert "--no-install-recommends" in arguments
            assert "rm -rf /var/lib/apt/lists/*" in arguments
        if name == "WORKDIR":
            assert arguments.startswith("/")
    assert [arguments for name, arguments in lines if name == "USER"] == ["ray"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=name_of)
def test_an_image_has_every_package_and_what_probes_and_stacks_need(path):
    text = path.read_text()
    for package in ("actors", "deploy", "learner", "queues", "weight_sync"):
        assert f"COPY {package} {package}\n" in text
    assert " wget" in text
    assert "py-spy" in (ROOT / "deploy" / "locks" / "cpu.txt").read_text()


def test_all_images_have_one_python_to_the_last_number_and_the_ray_of_the_cluster():
    texts = {path.suffix[1:]: path.read_text() for path in DOCKERFILES}
    [base] = re.findall(r"^FROM python:(\S+)-slim-bookworm$", texts["cpu"], re.MULTILINE)
    assert re.fullmatch(r"3\.\d+\.\d+", base)
    assert re.findall(r"uv python install .* (\S+) \\\n", texts["gpu"]) == [base]
    assert set(re.findall(r"cpython-(\d+\.\d+\.\d+)", texts["gpu"])) == {base}
    ray = CLUSTER["spec"]["rayVersion"]
    for name, text in texts.items():
        assert f"deploy/locks/{name}.txt" in text
        assert f"\nray=={ray}\n" in (ROOT / "deploy" / "locks" / f"{name}.txt").read_text()


def test_pods_that_ask_for_a_gpu_may_run_on_nodes_that_are_kept_for_them():
    job = read(SHIPPED / "machine" / "job.yaml")["spec"]["template"]["spec"]
    for pod in [*PODS, job]:
        limits = [container["resources"]["limits"] for container in pod["containers"]]
        asks = any("nvidia.com/gpu" in limit for limit in limits)
        keys = [toleration["key"] for toleration in pod.get("tolerations", [])]
        assert keys == ["nvidia.com/gpu"] * asks
