"""Plans as Slurm scripts and Kubernetes manifests, with the same words inside.

A shell reads the scripts and a YAML parser the manifests.
"""

import shlex
import shutil
import subprocess
from dataclasses import replace

import pytest

from megatron_cases import build_plan
from moewright.codec import parse_layout
from moewright.exporters.kubernetes import render_train_job
from moewright.exporters.megatron.script import (
    environment_variables,
    megatron_flags,
    render_megatron_script,
)
from moewright.exporters.slurm import render_slurm_script
from moewright.exporters.torchrun import RunFiles
from moewright.intake import catalogue
from moewright.intake.megatron.read import interpret_launch, read_launch
from moewright.spec.errors import BadInput
from moewright.spec.workload import CheckpointSpec, DataSpec, Workload
from sample_run import plan as cpu_plan

yaml = pytest.importorskip("yaml")


def planned(text="tp2,ep8", world=32, name="Qwen/Qwen3-30B-A3B", **work):
    workload = Workload(seq_len=4096, global_batch=256, steps=50, **work)
    return build_plan(name, parse_layout(text, world_size=world), workload)


SAVED = {"checkpoint": CheckpointSpec(every_steps=10), "data": DataSpec(train="/data/c/train")}


def ran(script, tmp_path):
    """Return the words that srun would start, and the environment, without Slurm."""
    path = tmp_path / "job.sh"
    fakes = """srun() {
  [ "$1" != bash ] || return 0  # the check of the nodes
  env | grep -E '^(CUDA|PYTORCH)_' || true; printf '%s\\n' "$@"
}
scontrol() { [ "$1" = show ] && printf 'n1\\nn2\\n' || echo "$@"; }
"""
    head, _, rest = script.partition("set -euo pipefail\n")
    path.write_text(f"{head}set -euo pipefail\n{fakes}{rest}")
    slurm_sets = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_JOB_ID": "77", "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", path], env=slurm_sets, capture_output=True, text=True, check=True
    )
    lines = done.stdout.splitlines()
    exported = dict(line.split("=", 1) for line in lines if line.startswith(("CUDA_", "PYTORCH_")))
    return [line for line in lines if not line.startswith(("CUDA_", "PYTORCH_"))], exported


def test_slurm_starts_one_torchrun_a_node_that_meets_on_the_first(tmp_path):
    options = planned()
    script = render_slurm_script(options, job="", run_dir="")
    for line in (
        "--nodes=4",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--job-name=qwen3-30b-a3b",
    ):
        assert f"#SBATCH {line}\n" in script
    words, exported = ran(script, tmp_path)
    assert exported == dict(environment_variables(options.layout))
    start = words.index("pretrain_gpt.py")
    assert words[1:start] == shlex.split(
        "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-id 77 "
        "--rdzv-endpoint n1:29500"
    )
    assert words[start + 1 :] == [word for flag in megatron_flags(options) for word in flag]


def test_slurm_on_one_node_needs_no_rendezvous(tmp_path):
    words, _ = ran(render_slurm_script(planned(world=8), job="", run_dir=""), tmp_path)
    assert words[1:5] == ["torchrun", "--standalone", "--nproc-per-node", "8"]


def test_slurm_starts_our_own_engine_on_a_job_and_warns_it(tmp_path):
    script = render_slurm_script(replace(cpu_plan()), job="jobs/a b.toml", run_dir="runs/q")
    assert "#SBATCH --signal=TERM@120\n" in script
    assert "--gpus-per-node" not in script
    words, exported = ran(script, tmp_path)
    assert words[-9:] == [
        *("--max-restarts", "3", "--no-python", "moewright", "train", "jobs/a b.toml"),
        *("--out", "runs/q", "--supervise"),
    ]
    assert exported == {}


@pytest.mark.parametrize(("restarts", "is_queued"), [("", True), ("9", True), ("10", False)])
def test_slurm_queues_our_own_engine_again_when_it_fails(tmp_path, restarts, is_queued):
    script = render_slurm_script(cpu_plan(), job="job.toml", run_dir="runs/q")
    assert "#SBATCH --requeue\n" in script
    path = tmp_path / "job.sh"
    path.write_text(f'srun() {{ return 3; }}\nscontrol() {{ echo "$@"; }}\n{script}')
    environment = {"SLURM_JOB_ID": "77", "PATH": "/usr/bin:/bin", "SLURM_RESTART_COUNT": restarts}
    done = subprocess.run(["bash", path], env=environment, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stdout == ("requeue 77\n" if is_queued else "")


@pytest.mark.parametrize("work", [{}, SAVED])
def test_a_slurm_script_is_read_back(tmp_path, work):
    options = planned("tp2,pp4,ep4,vpp3", **work)
    path = tmp_path / "job.sh"
    path.write_text(render_slurm_script(options, job="", run_dir=""))
    command = read_launch(path, {})
    result = interpret_launch(command, world_size=command.world_size, folder=tmp_path)
    assert (result.model, result.workload, result.layout) == (
        options.model,
        options.workload,
        options.layout,
    )


def test_kubernetes_gets_nodes_ranks_devices_and_every_word():
    options = planned("tp2,pp4,ep4,layout='Et*12|t*12|t*12|t*12L'")
    runtime, result = yaml.safe_load_all(
        render_train_job(options, job="", run_dir="", image="nvcr.io/nvidia/nemo:26.06")
    )
    assert (result["apiVersion"], result["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert result["metadata"]["name"] == "qwen3-30b-a3b"
    assert result["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert "failurePolicy" not in runtime["spec"]["template"]["spec"]  # nothing is saved
    trainer = result["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (4, 8)
    adapter = {"rdma/rdma_shared_device_a": 1}
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": 8, **adapter}
    assert trainer["image"] == "nvcr.io/nvidia/nemo:26.06"
    assert trainer["command"] == ["sh", "-c"]
    (line,) = trainer["args"]
    assert shlex.split(line.replace("\\\n", " ")) == [
        "exec",
        "torchrun",
        "pretrain_gpt.py",
        *(word for flag in megatron_flags(options) for word in flag),
    ]
    environment = {item["name"]: item["value"] for item in trainer["env"]}
    assert environment.items() > dict(environment_variables(options.layout)).items()
    assert environment["NCCL_IB_TIMEOUT"] == "22"


def pod_of(runtime):
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]["spec"]


def test_pods_share_memory_and_keep_what_a_run_reads_and_saves():
    options = planned(**SAVED)
    files = RunFiles(save="/ckpt/run")
    rendered = render_train_job(options, job="", run_dir="", image="x", files=files)
    runtime, job = yaml.safe_load_all(rendered)
    pod = pod_of(runtime)
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {"/dev/shm": "shm", "/ckpt/run": "run", "/data/c": "data"}
    volumes = {volume.pop("name"): volume for volume in pod["volumes"]}
    assert volumes["shm"] == {"emptyDir": {"medium": "Memory"}}
    assert volumes["run"]["persistentVolumeClaim"]["claimName"] == "qwen3-30b-a3b-run"
    assert container["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert runtime["spec"]["template"]["spec"]["failurePolicy"] == {"maxRestarts": 10}
    assert "torchrun --max-restarts 3" in job["spec"]["trainer"]["args"][0]
    with pytest.raises(BadInput, match="--save=checkpoints: is a folder of the pod"):
        render_train_job(options, job="", run_dir="", image="x")


@pytest.mark.parametrize(
    ("part", "resource", "count"),
    [("H100", "vpc.amazonaws.com/efa", 32), ("H200", "vpc.amazonaws.com/efa", 16)],
)
def test_pods_ask_for_the_adapters_of_their_network(part, resource, count):
    hardware = catalogue.hardware(f"32x{part}")
    options = replace(
        planned(), hardware=replace(hardware, fabric=replace(hardware.fabric, network="efa"))
    )
    rendered = render_train_job(options, job="", run_dir="", image="x")
    trainer = list(yaml.safe_load_all(rendered))[1]["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"][resource] == count
    names = {item["name"] for item in trainer["env"]}
    assert "FI_PROVIDER" in names
    assert "NCCL_IB_TIMEOUT" not in names


@pytest.mark.parametrize(
    ("saved", "restarts", "is_queued"),
    [("20", "", True), ("", "9", True), ("50", "", False), ("20", "10", False)],
)
def test_slurm_queues_megatron_again_until_its_last_step_is_saved(
    tmp_path, saved, restarts, is_queued
):
    folder = tmp_path / "a run"
    folder.mkdir()
    if saved:
        (folder / "latest_checkpointed_iteration.txt").write_text(saved)
    files = RunFiles(save=str(folder))
    script = render_slurm_script(planned(**SAVED), job="", run_dir="", image="x:1", files=files)
    assert "#SBATCH --requeue\n" in script
    path = tmp_path / "job.sh"
    path.write_text(
        'srun() { [ "$1" != bash ] || return 0; printf "%s\\n" "$@" >&2; return 3; }\n'
        'scontrol() { echo "$@"; }\n' + script
    )
    environment = {"SLURM_JOB_ID": "77", "PATH": "/usr/bin:/bin", "SLURM_RESTART_COUNT": restarts}
    environment |= {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_END_TIME": "4000000000"}
    done = subprocess.run(["bash", path], env=environment, capture_output=True, text=True)
    assert done.returncode == 3
    assert ("requeue 77\n" in done.stdout) == is_queued
    words = done.stderr.splitlines()
    assert int(words[words.index("--exit-duration-in-mins") + 1]) > 1e6
    assert f"--container-mounts={tmp_path.cwd()}:" in words[2]
    assert words[2].endswith(f",{folder}:{folder},/data/c:/data/c")


def test_a_node_without_all_its_gpus_is_named_before_the_start(tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(
        "nvidia-smi() { printf 'GPU 0\\nGPU 1\\n'; }\nexport -f nvidia-smi\n"
        'srun() { "$@"; }\n' + render_slurm_script(planned(), job="", run_dir="")
    )
    done = subprocess.run(["bash", path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.endswith(": a GPU is missing\n")


def test_kubernetes_starts_our_own_engine_on_a_job_and_asks_a_cpu_for_no_devices():
    runtime, job = yaml.safe_load_all(
        render_train_job(cpu_plan(), job='a "b": #.toml', run_dir="r", image="x")
    )
    trainer = job["spec"]["trainer"]
    (line,) = trainer["args"]
    assert shlex.split(line.replace("\\\n", " "))[2:] == [
        *("--max-restarts", "3", "--no-python", "moewright", "train", 'a "b": #.toml'),
        *("--out", "r", "--supervise"),
    ]
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    assert runtime["spec"]["template"]["spec"]["failurePolicy"] == {"maxRestarts": 10}
    assert "resourcesPerNode" not in trainer
    assert "env" not in trainer


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_scripts_are_clean_by_shellcheck(tmp_path):
    rendered = (
        render_megatron_script(planned()),
        render_megatron_script(planned("pp2,vpp2,recompute=moe_act", name="Qwen/Qwen3-30B-A3B")),
        render_slurm_script(planned(), job="", run_dir=""),
        render_megatron_script(planned(**SAVED), RunFiles(save="a run", remarks=("a 'remark'",))),
        render_slurm_script(
            planned(**SAVED), job="", run_dir="", image="a:b", files=RunFiles(save="/a run")
        ),
        render_slurm_script(cpu_plan(), job="a job.toml", run_dir="a run"),
    )
    for number, text in enumerate(rendered):
        path = tmp_path / f"{number}.sh"
        path.write_text(text)
        done = subprocess.run(["shellcheck", path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_kubernetes_asks_for_amds_devices_by_their_own_name():
    options = replace(planned(), hardware=catalogue.hardware("32xMI300X"))
    rendered = render_train_job(options, job="", run_dir="", image="rocm/megatron-lm")
    trainer = list(yaml.safe_load_all(rendered))[1]["spec"]["trainer"]
    assert trainer["resourcesPerNode"]["limits"]["amd.com/gpu"] == 8
    assert not any(item["name"].startswith("NCCL") for item in trainer["env"])


@pytest.mark.parametrize(
    ("name", "label"), [("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"), ("7 B!", "job-7-b"), ("", "job")]
)
def test_names_are_labels(name, label):
    options = replace(cpu_plan(), model=replace(cpu_plan().model, name=name))
    assert f"--job-name={label}\n" in render_slurm_script(options, job="j", run_dir="r")


def test_what_cannot_be_started_is_refused():
    with pytest.raises(BadInput, match="--image: is needed for k8s"):
        render_train_job(planned(), job="", run_dir="", image="")
    with pytest.raises(
        BadInput, match=r"hardware\.device\.kind=cpu: Megatron-LM trains on CUDA and ROCm devices"
    ):
        render_slurm_script(cpu_plan(), job="", run_dir="")
    with pytest.raises(BadInput, match="must fill whole nodes of 8 devices"):
        render_slurm_script(
            build_plan("Qwen/Qwen3-0.6B", parse_layout("", world_size=12), planned().workload),
            job="",
            run_dir="",
        )
    assert catalogue.hardware("GB200").fabric.devices_per_node == 4


def test_kubernetes_says_the_reason_for_each_variable_of_the_network():
    text = str(render_train_job(planned(), job="", run_dir="", image="trainer:1"))
    comments = {line.partition("=")[0] for line in text.splitlines() if line.startswith("# NCCL_")}
    variables = {
        line.partition('"')[2].rstrip('"')
        for line in text.splitlines()
        if line.lstrip().startswith('- name: "NCCL_')
    }
    assert variables
    assert comments == {f"# {name}" for name in variables}
