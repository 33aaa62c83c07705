"""How many ranks a command starts, in every form that says it, and in mutants of each form."""

import re

import pytest

from moewright.api.launch_scripts import read_flags
from moewright.spec.errors import BadInput

TRAINS = (
    "pretrain_gpt.py --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 "
    "--max-position-embeddings 1024 --vocab-size 32000 --micro-batch-size 1 "
    "--global-batch-size 960 --bf16"
)
# Nodes {n}, ranks on each {p}, all of them {t}.
FORMS = (
    "torchrun --nnodes={n} --nproc_per_node={p} {x}",
    "torchrun --nnodes {n} --nproc-per-node {p} {x}",
    "dlrover-run --network-check --nnodes={n} --nproc_per_node={p} {x}",
    "python -m torch.distributed.run --nnodes {n} --nproc_per_node {p} {x}",
    "python -m torch.distributed.launch --nproc_per_node {p} --nnodes {n} {x}",
    "deepspeed --num_nodes {n} --num_gpus {p} {x}",
    "accelerate launch --num_machines {n} --num_processes {t} {x}",
    "export PET_NNODES={n} PET_NPROC_PER_NODE={p}\ntorchrun {x}",
    "#SBATCH --nodes={n}\n#SBATCH --ntasks-per-node={p}\nsrun python {x}",
    "#SBATCH -N {n}\nsrun --ntasks-per-node={p} python3 -u {x}",
    "#SBATCH --nodes={n}\n#SBATCH --gpus-per-node={p}\n"
    "srun torchrun --nnodes $SLURM_NNODES --nproc_per_node $SLURM_GPUS_ON_NODE {x}",
    "srun --nodes={n} --ntasks-per-node {p} python {x}",
    "srun -u -n{t} python {x}",
    "mpirun -np {t} python {x}",
    "mpirun --map-by ppr:{p}:node -np {t} python {x}",
    "mpirun -np {t} -N {p} python {x}",
    "mpiexec -n {t} -ppn {p} python {x}",
    "mpirun -H first:{p},second:{p},third:{p} python {x}",
    "jsrun -n {n} -a {p} python {x}",
    "aprun -n {t} -N {p} python {x}",
    "flux run -N {n} --tasks-per-node={p} python {x}",
    "export WORLD_SIZE={t}\npython {x}",
    "pdsh -w node1,node2 'torchrun --nnodes {n} --nproc_per_node {p} {x}'",
    "srun bash -c 'torchrun --nnodes {n} --nproc_per_node {p} {x}'",
)
GIVEN = "64xH100"
COUNT = re.compile(r"\{[npt]\}")
OPTION = re.compile(r"-?-?[\w-]*[ =:]?\{[npt]\}(:node)?")


def write(folder, text):
    script = folder / "run.sh"
    script.write_text(f"{text}\n")
    return script


def fill(form, nodes, per_node):
    values = {"n": nodes, "p": per_node, "t": nodes * per_node, "x": TRAINS}
    return re.sub(r"\{([nptx])\}", lambda match: str(values[match[1]]), form)


def ranks(script):
    return read_flags(script, on="H100").plan.layout.world_size


def is_told(script):
    """Whether a reading on the given devices refuses them, or names what says the ranks."""
    try:
        notes = " ".join(read_flags(script, on=GIVEN).notes)
    except BadInput:
        return True
    return f"{GIVEN[:2]} ranks as --on says" in notes


@pytest.mark.parametrize("form", FORMS)
def test_counts_are_those_of_the_command_wherever_they_stand(form, tmp_path):
    for nodes, per_node in ((3, 4), (3, 8)):
        assert ranks(write(tmp_path, fill(form, nodes, per_node))) == nodes * per_node
    if "#SBATCH" in form or "'" in form:  # neither expands a variable of the script
        return
    moved = re.sub(r"\{([npt])\}", r"${COUNT_\1}", form).replace("{x}", TRAINS)
    counts = "COUNT_n=3\nCOUNT_p=4\nCOUNT_t=12\n"
    assert ranks(write(tmp_path, counts + moved)) == 12
    (tmp_path / "counts.sh").write_text(counts)
    assert ranks(write(tmp_path, f"source ./counts.sh\n{moved}")) == 12
    assert is_told(write(tmp_path, f"source ./no_counts.sh\n{moved}"))
    assert is_told(write(tmp_path, moved))


@pytest.mark.parametrize("form", FORMS)
def test_a_count_that_is_changed_or_left_out_is_never_passed_over(form, tmp_path):
    """On 64 devices, of which the whole form says other counts or none."""
    for match in OPTION.finditer(form):
        shorter = form[: match.start()] + form[match.end() :]
        assert is_told(write(tmp_path, fill(shorter, 2, 4))), match[0]
    for match in COUNT.finditer(form):
        other = form[: match.start()] + "5" + form[match.end() :]
        assert is_told(write(tmp_path, fill(other, 2, 4))), match[0]


def test_what_the_job_and_the_launcher_say_differently_is_told(tmp_path):
    head = "#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=8\n"
    script = write(tmp_path, f"{head}srun torchrun --nnodes 2 --nproc_per_node 8 {TRAINS}")
    reading = read_flags(script, on="H100")
    notes = " ".join(reading.notes)
    assert reading.plan.layout.world_size == 16
    assert "srun asks for 4 nodes and torchrun starts 2" in notes
    assert "8 times a node" in notes


def test_nodes_of_a_file_of_hosts_are_not_one(tmp_path):
    script = write(tmp_path, f"deepspeed --hostfile hosts --num_gpus 8 {TRAINS}")
    assert "deepspeed takes its nodes from elsewhere" in " ".join(
        read_flags(script, on=GIVEN).notes
    )


def test_words_of_an_address_that_is_to_be_filled_in_are_no_options(tmp_path):
    head = 'ADDR="your master IP Address"\nNODES="your nodes"\n'
    words = "--master_addr $ADDR --master_port your port {} --nproc_per_node 8"
    script = write(tmp_path, f"{head}torchrun {words.format('--nnodes 2')} {TRAINS}")
    assert ranks(script) == 16
    script = write(tmp_path, f"{head}torchrun {words.format('--nnodes $NODES')} {TRAINS}")
    with pytest.raises(BadInput):
        ranks(script)
