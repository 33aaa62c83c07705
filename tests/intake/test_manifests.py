"""Manifests of Kubernetes: the command of their pods, and how many ranks these are."""

import pytest

from moewright.api.launch_scripts import read_flags
from moewright.api.running import export
from moewright.codec import parse_layout
from moewright.intake.catalogue import hardware, model
from moewright.search.search import build_plan
from moewright.spec.errors import BadInput
from moewright.spec.options import RunOptions
from moewright.spec.workload import Workload

TRAINS = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --vocab-size 32000 --micro-batch-size 1 "
    "--global-batch-size 960 --bf16"
)
POD = """
template:
  spec:
    containers:
    - name: trainer
      image: trainer
      command: ["bash", "-c"]
      args: ["{command}"]
      env:
      - {{name: GPUS, value: "4"}}
      resources: {{limits: {{nvidia.com/gpu: 4}}}}
"""
HEAD = "apiVersion: x/v1\nkind: {}\nmetadata: {{name: job}}\nspec:\n"


def indent(text, by):
    return "".join(f"{' ' * by}{line}\n" for line in text.strip().splitlines())


def manifest(kind, command):
    pod = POD.format(command=f"{command} {TRAINS}")
    if kind == "PyTorchJob":
        master = f"    Master:\n      replicas: 1\n{indent(pod, 6)}"
        workers = f"    Worker:\n      replicas: 2\n{indent(pod, 6)}"
        return f"{HEAD.format(kind)}  pytorchReplicaSpecs:\n{master}{workers}"
    if kind == "JobSet":
        inner = indent("template:\n  spec:\n    parallelism: 3\n" + indent(pod, 4), 4)
        return f"{HEAD.format(kind)}  replicatedJobs:\n  - name: node\n{inner}"
    return f"{HEAD.format(kind)}  parallelism: 3\n{indent(pod, 2)}"


@pytest.mark.parametrize("kind", ["PyTorchJob", "JobSet", "Job"])
def test_the_pods_of_a_manifest_are_nodes(kind, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(manifest(kind, "exec torchrun --nnodes=3 --nproc_per_node=$GPUS"))
    assert read_flags(path, on="H100").plan.layout.world_size == 12
    path.write_text(manifest(kind, "torchrun --nnodes=2 --nproc_per_node=$(GPUS)"))
    reading = read_flags(path, on="H100")
    assert reading.plan.layout.world_size == 8
    assert "the manifest asks for 3 nodes and torchrun starts 2" in " ".join(reading.notes)
    path.write_text(manifest(kind, "torchrun"))
    if kind == "PyTorchJob":  # its operator sets torchrun's variables
        assert read_flags(path, on="H100").plan.layout.world_size == 12
        return
    with pytest.raises(BadInput, match="needs a count"):
        read_flags(path, on="H100")


def mpi_job(command):
    """Return a job of a launcher without devices and two workers, whose slots do not count."""
    launcher = POD.format(command=f"{command} {TRAINS}").replace("nvidia.com/gpu: 4", "cpu: 2")
    worker = POD.replace('command: ["bash", "-c"]', "tty: true").replace('args: ["{command}"]', "")
    specs = "  slotsPerWorker: 4\n  mpiReplicaSpecs:\n"
    for role, count, pod in (("Launcher", 1, launcher), ("Worker", 2, worker.format())):
        specs += f"    {role}:\n      replicas: {count}\n{indent(pod, 6)}"
    return HEAD.format("MPIJob") + specs


def test_the_launcher_of_an_mpi_job_says_its_ranks(tmp_path):
    path = tmp_path / "job.yaml"
    for count in (4, 8):  # the launcher is no node, and workers are what mpirun makes of them
        path.write_text(mpi_job(f"mpirun -np {count} python"))
        assert read_flags(path, on="H100").plan.layout.world_size == count
    path.write_text(mpi_job("mpirun python"))
    with pytest.raises(BadInput) as caught:
        read_flags(path, on="H100")
    assert caught.value.reasons[0].field == "--on"
    assert read_flags(path, on="8xH100").plan.layout.world_size == 8


def test_the_entry_of_a_ray_job_is_its_command(tmp_path):
    path = tmp_path / "job.yaml"
    entry = "torchrun --nnodes=2 --nproc_per_node={} {}"
    pod = indent(POD.format(command="ray start").replace("GPUS", "OTHER"), 6)
    cluster = f"  rayClusterSpec:\n    headGroupSpec:\n{pod}"
    for ranks in (4, 2):
        line = f"  entrypoint: {entry.format(ranks, TRAINS)}\n"
        path.write_text(HEAD.format("RayJob") + line + cluster)
        assert read_flags(path, on="H100").plan.layout.world_size == 2 * ranks
    path.write_text(HEAD.format("RayJob") + f"  entrypoint: python {TRAINS}\n" + cluster)
    with pytest.raises(BadInput) as caught:
        read_flags(path, on="H100")
    assert caught.value.reasons[0].field == "--on"


def test_a_plan_comes_back_from_its_train_job(tmp_path):
    layout = parse_layout("tp2,pp2,ep4,overlap=grad", world_size=32)
    workload = Workload(seq_len=4096, global_batch=256, steps=500)
    plan = build_plan(model("Qwen3-30B-A3B"), workload, hardware("32xH100"), layout)
    path = tmp_path / "job.yaml"
    path.write_text(
        str(export(plan, to="k8s", job="", image="trainer", run_dir=".", run=RunOptions()))
    )
    again = read_flags(path, on="H100").plan
    assert (again.model, again.workload, again.layout) == (plan.model, workload, layout)
    path.write_text(path.read_text().replace("numNodes: 4", "numNodes: 2"))
    assert read_flags(path, on="H100").plan.layout.world_size == 16


def test_a_template_of_helm_and_a_manifest_without_a_command_are_named(
    tmp_path,
):
    path = tmp_path / "job.yaml"
    path.write_text(f"{HEAD.format('Job')}  parallelism: {{{{ .Values.nodes }}}}\n")
    with pytest.raises(BadInput, match="Helm"):
        read_flags(path, on="H100")
    path.write_text(f"{HEAD.format('Service')}  ports: []\n")
    with pytest.raises(BadInput, match="none of its containers has a command"):
        read_flags(path, on="H100")
