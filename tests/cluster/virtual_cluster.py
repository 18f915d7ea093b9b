"""A real Slurm of virtual hosts on one Linux machine (root), for what one host cannot show.

Each host is a network namespace with its own address, host name, /tmp and /etc/hosts. Outside the
folder of the cluster nothing of the machine changes but a bridge and the namespaces, which `down`
removes. By hand:

    python tests/cluster/virtual_cluster.py up | down | shell HOST | cut HOST | mend HOST
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = Path("/var/lib/flowpm-virtual-cluster")
HOSTS = ("node1", "node2")
CONTROLLER = "control"
PREFIX = "flowpm-"  # of namespaces and links
BRIDGE = "flowpm-br"
NETWORK = "10.97.0"
PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "munged", "ip", "nsenter", "unshare", "mount")
PACKAGES = "slurm-wlm slurmctld slurmd munge libpmix2 iproute2 util-linux"
PMIX = "/usr/lib/*/pmix2/lib"

CONFIGURATION = """\
ClusterName=virtual
SlurmctldHost={controller}({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=20
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2
SlurmdTimeout=300
KillWait=5
JobRequeue=1
{nodes}
PartitionName=all Nodes={hosts} Default=YES State=UP OverSubscribe=YES
"""


def lacking() -> str | None:
    """Returns why there can be no virtual cluster here; None if there can."""
    if os.geteuid() != 0:
        return "it wants root"
    if missing := [program for program in PROGRAMS if find(program) is None]:
        return f"no {', '.join(missing)} (Debian: apt-get install {PACKAGES})"
    if not _pmix_folder():
        return f"no PMIx library for Slurm (Debian: apt-get install {PACKAGES})"
    return None


def find(program: str) -> str | None:
    """Returns the path of a program, also of those for root alone."""
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def _pmix_folder() -> Path | None:
    return next(iter(sorted(Path("/").glob(PMIX[1:]))), None)


def sh(*words: str | Path, check: bool = True) -> str:
    """Runs a command; returns its output."""
    done = subprocess.run(list(map(str, words)), text=True, capture_output=True)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout


class VirtualCluster:
    """The hosts and what runs on them.

    Args:
        shared: folders that all hosts see even if they lie below /tmp.
    """

    def __init__(self, shared: Sequence[Path] = (ROOT, Path(sys.prefix))) -> None:
        self._shared = [path.resolve() for path in shared]
        self.results = FOLDER / "shared"
        """A folder that all hosts see."""

    def up(self) -> None:
        """Starts the hosts and Slurm.

        Raises:
            RuntimeError: they do not come up.
        """
        self.down()
        for name in ("log", "state", "shared", "run"):
            (FOLDER / name).mkdir(parents=True)
        self._start_munge()
        self._write_configuration()
        sh("ip", "link", "add", BRIDGE, "type", "bridge")
        sh("ip", "link", "set", BRIDGE, "up")
        for number, name in enumerate((CONTROLLER, *HOSTS), start=1):
            self._start_host(name, number)
        self.run(CONTROLLER, find("slurmctld"), check=True)
        for name in HOSTS:
            self.run(name, find("slurmd"), "-N", name, check=True)
        limit = time.monotonic() + 60
        while time.monotonic() < limit:
            idle = self.run(CONTROLLER, "sinfo", "-h", "-t", "idle", "-o", "%D").stdout.strip()
            if idle == str(len(HOSTS)):
                return
            time.sleep(0.5)
        raise RuntimeError(f"the hosts did not come up; see {FOLDER / 'log'}")

    def down(self) -> None:
        """Ends what runs on the hosts, and removes them."""
        for name in (*HOSTS, CONTROLLER):
            for process in self.processes(name):
                _kill(process)
            sh("ip", "netns", "del", PREFIX + name, check=False)
            sh("ip", "link", "del", PREFIX + name, check=False)
        sh("ip", "link", "del", BRIDGE, check=False)
        if (FOLDER / "munged.pid").exists():
            _kill(int((FOLDER / "munged.pid").read_text()))
        shutil.rmtree(FOLDER, ignore_errors=True)

    def _start_munge(self) -> None:
        key = FOLDER / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        files = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "log/munged.log"}
        files |= {"seed-file": "munged.seed", "key-file": "munge.key"}
        sh(find("munged") or "", "--force", *(f"--{k}={FOLDER / v}" for k, v in files.items()))

    def _write_configuration(self) -> None:
        memory = int(Path("/proc/meminfo").read_text().split()[1]) * 9 // 10 // 1024
        nodes = "\n".join(
            f"NodeName={name} NodeAddr={NETWORK}.{number} CPUs={os.cpu_count()} RealMemory={memory}"
            for number, name in enumerate(HOSTS, start=2)
        )
        text = CONFIGURATION.format(
            controller=CONTROLLER,
            network=NETWORK,
            folder=FOLDER,
            nodes=nodes,
            hosts=",".join(HOSTS),
        )
        (FOLDER / "slurm.conf").write_text(text)
        names = "".join(
            f"{NETWORK}.{number} {name}\n"
            for number, name in enumerate((CONTROLLER, *HOSTS), start=1)
        )
        (FOLDER / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        # Slurm's plugin opens a name that Debian's package does not have.
        source = _pmix_folder()
        assert source is not None
        shutil.copytree(source, FOLDER / "pmix", symlinks=True)
        if not (FOLDER / "pmix" / "libpmix.so").exists():
            (FOLDER / "pmix" / "libpmix.so").symlink_to("libpmix.so.2")

    def _start_host(self, name: str, number: int) -> None:
        """Makes the namespaces of a host, and a process that keeps them."""
        space = PREFIX + name
        sh("ip", "netns", "add", space)
        sh("ip", "link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
        sh("ip", "link", "set", space, "master", BRIDGE, "up")
        sh("ip", "-n", space, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
        sh("ip", "-n", space, "link", "set", "eth0", "up")
        sh("ip", "-n", space, "link", "set", "lo", "up")
        own = FOLDER / f"tmp-{name}"
        own.mkdir(mode=0o1777)
        own.chmod(0o1777)
        steps = [f"hostname {name}", f"mount --bind {FOLDER}/hosts /etc/hosts"]
        steps += [f"mount --bind {FOLDER}/pmix {_pmix_folder()}"]
        # Two hosts in one /tmp would meet in the folders of PMIx's servers.
        for path in self._shared:
            if path.is_relative_to("/tmp"):
                there = own / path.relative_to("/tmp")
                steps += [f"mkdir -p {there}", f"mount --bind {path} {there}"]
        steps += [f"mount --rbind {own} /tmp", f"echo $$ > {FOLDER}/run/{name}"]
        script = " && ".join([*steps, "exec sleep infinity"])
        # Not `ip netns exec`, which mounts another /sys: slurmd looks for its control groups there.
        subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{space}", "unshare", "-u", "-m", "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        limit = time.monotonic() + 10
        while not (FOLDER / "run" / name).exists():
            if time.monotonic() > limit:
                raise RuntimeError(f"{name} did not start")
            time.sleep(0.05)

    def inside(self, name: str, *words: object) -> list[str]:
        """Returns the command that runs another one on a host."""
        keeper = (FOLDER / "run" / name).read_text().strip()
        enter = ["nsenter", "-t", keeper, "-n", "-u", "-m", f"--wd={self.results}"]
        return [*enter, *map(str, words)]

    def environment(self, **more: str) -> dict[str, str]:
        """Returns the environment of commands on a host."""
        ours = {
            "SLURM_CONF": str(FOLDER / "slurm.conf"),
            "PYTHONPATH": str(ROOT),
            "FLOWPM_CACHE": str(self.results / "cache"),
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        return {**os.environ, **ours, **more}

    def run(
        self, name: str, *words: object, check: bool = False, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command on a host to its end."""
        # Files, not pipes: a daemon keeps what it was given open.
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            status = subprocess.run(
                self.inside(name, *words),
                env=self.environment(**environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            ).returncode
            out.seek(0), err.seek(0)
            done = subprocess.CompletedProcess(words, status, out.read(), err.read())
        if check and status:
            raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
        return done

    def processes(self, name: str) -> list[int]:
        """Returns the processes on a host."""
        return [int(word) for word in sh("ip", "netns", "pids", PREFIX + name, check=False).split()]

    def cut(self, name: str) -> None:
        """Pulls a host's cable."""
        sh("ip", "link", "set", PREFIX + name, "down")

    def mend(self, name: str) -> None:
        """Plugs it in again."""
        sh("ip", "link", "set", PREFIX + name, "up")

    def freeze(self, name: str) -> None:
        """Stops everything on a host."""
        for process in self.processes(name):
            os.kill(process, signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Lets it go on."""
        for process in self.processes(name):
            os.kill(process, signal.SIGCONT)


def _kill(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
    except ProcessLookupError:
        pass


def main(words: Sequence[str]) -> None:
    """What a person does by hand."""
    cluster = VirtualCluster()
    if (reason := lacking()) is not None:
        sys.exit(f"no virtual cluster: {reason}")
    if words[:1] == ["shell"]:
        command = cluster.inside(words[1], os.environ.get("SHELL", "bash"))
        os.execvpe(command[0], command, cluster.environment())
    actions = {"up": cluster.up, "down": cluster.down}
    on_host = {"cut": cluster.cut, "mend": cluster.mend}
    if len(words) == 1 and words[0] in actions:
        actions[words[0]]()
    elif len(words) == 2 and words[0] in on_host:
        on_host[words[0]](words[1])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
