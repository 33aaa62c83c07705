"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd in one folder."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")
_START_S = 15.0
# The nodes meet under their names, which only processes of a mount namespace of their own know:
# whatever kills the run, the machine's own file is as it was.
_HOSTS = Path("/etc/hosts")
_NAMES = "127.0.0.1 node1 node2 # moewright's two nodes"
_MARK = "MOEWRIGHT_SLURM_NAMESPACE"
_CONFIG = """
ClusterName=two
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=0
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=2
ReturnToService=2
MaxJobCount=5000
GresTypes=gpu
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={port1} CPUs=8 RealMemory=2000 Gres=gpu:8
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={port2} CPUs=8 RealMemory=2000 Gres=gpu:8
PartitionName=trials Nodes=node[1-2] Default=YES MaxTime=60 State=UP
"""


def enter_namespace() -> None:
    """Start this program again where its mounts and processes are its own, and end with it."""
    if os.environ.get(_MARK) != "1":
        words = ("unshare", "--mount", "--propagation", "private", "--pid", "--mount-proc")
        words += ("--fork", "--kill-child", sys.executable, *sys.argv)
        os.execvpe(words[0], words, os.environ | {_MARK: "1"})


class Cluster:
    """A Slurm whose daemons end with `stop`; `environment` lets its commands find it."""

    def __init__(self, folder: Path) -> None:
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            sys.exit(f"no {', '.join(missing)} here: apt-get install slurm-wlm munge")
        self._folder = folder
        folder.mkdir(parents=True)
        for name in ("state", "spool-node1", "spool-node2"):
            (folder / name).mkdir()
        self._ports = dict(zip(("port", "port1", "port2"), _free_ports(3), strict=True))
        host = socket.gethostname().partition(".")[0]
        text = _CONFIG.format(folder=folder, host=host, **self._ports)
        (folder / "slurm.conf").write_text(text)
        for number in range(8):
            (folder / f"gpu{number}").touch()
        devices = f"NodeName=node[1-2] Name=gpu File={folder}/gpu[0-7]\n"
        (folder / "gres.conf").write_text(f"AutoDetect=off\n{devices}")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start every daemon and wait until both nodes are idle."""
        folder = self._folder
        hosts = folder / "hosts"
        hosts.write_text(f"{_HOSTS.read_text().rstrip()}\n{_NAMES}\n")
        subprocess.run(("mount", "--bind", hosts, _HOSTS), check=True)
        self._start(
            "munged",
            *("munged", "--foreground", "--force", f"--key-file={folder}/munge.key"),
            *(f"--socket={folder}/munge.socket", f"--pid-file={folder}/munged.pid"),
            *(f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"),
        )
        self._wait(lambda: (folder / "munge.socket").exists(), "munged")
        self._start("slurmctld", "slurmctld", "-D", "-i")
        for node in ("node1", "node2"):
            self.start_node(node)
        self._wait(lambda: self.node_states() == {"node1": "idle", "node2": "idle"}, "nodes")

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Take a node away as a power cut does, with all that runs on it."""
        self._daemons.pop(node).kill()
        for pid in _find_steps(node):
            os.kill(pid, signal.SIGKILL)

    def call(self, *words: str) -> str:
        """Run a command of Slurm and return what it prints."""
        done = subprocess.run(
            words, env=self.environment, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    def node_states(self) -> dict[str, str]:
        """Return the state of every node, such as idle, alloc or down*."""
        lines = self.call("sinfo", "-N", "-h", "-o", "%N %t").splitlines()
        return dict(line.split() for line in lines if len(line.split()) == 2)

    def jobs(self) -> dict[str, str]:
        """Return the state of every job that the controller knows, tasks of arrays as 7_0."""
        text = self.call("squeue", "-h", "-t", "all", "-o", "%i %T")
        return dict(line.split() for line in text.splitlines() if len(line.split()) == 2)

    def wait(self, is_true: Callable[[], bool], what: str) -> None:
        self._wait(is_true, what)

    def stop(self) -> None:
        subprocess.run(("umount", _HOSTS), check=False)
        for name in ("node1", "node2", "slurmctld", "munged"):
            if (daemon := self._daemons.pop(name, None)) is not None:
                daemon.terminate()
                try:
                    daemon.wait(15)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()

    def _start(self, name: str, *words: str) -> None:
        with (self._folder / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                words, env=self.environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL
            )

    def _wait(self, is_true: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + _START_S
        while not is_true():
            if time.monotonic() > deadline:
                logs = sorted(self._folder.glob("*.log")) + sorted(self._folder.glob("*.out"))
                for log in logs:
                    print(f"--- {log.name}", *log.read_text().splitlines()[-15:], sep="\n")
                raise TimeoutError(f"{what}: not within {_START_S:g} s; {self.node_states()}")
            time.sleep(0.2)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _find_steps(node: str) -> list[int]:
    """Return the processes of jobs on a node, whose environment names it."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"SLURMD_NODENAME={node}".encode() in words:
            pids.append(int(path.parent.name))
    return pids
