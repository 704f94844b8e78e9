"""``make chaos``: a short real run that is broken in every way, a hundred times and more, and the proof that it lost nothing.

A driver, two vLLM servers behind the router, a trainer and reward workers train a tiny model asynchronously. A seeded schedule
of faults breaks one of them after another: processes are killed or stopped, answers cut, spoilt or garbled, rewards raise, hang
or eat memory, the disk fills up. A run that ends is resumed. At the end the journal and the last checkpoint must account
for every prompt: trained once, filtered with a reason, or in the buffer.

    python -m tests.chaos [FAULT ...]     only faults whose names begin so: router, "server stopped"
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from tests.faults import FOLDER, OF_RESPONSES, OF_REWARDS
from tests.tiny import make_model
from vime.checkpoint import Checkpoints, read_state
from vime.data.journal import account

ROOT = Path(__file__).parents[1]
CONFIG = """
[run]
steps = 100000
[model]
path = "{folder}/model"
dtype = "float32"
[data]
source = "{folder}/prompts.jsonl"
[reward]
function = "tests.faults:reward"
timeout_s = 3
memory_mb = 600
[rollout]
groups = 4
samples_per_group = 4
max_tokens = 16
max_staleness = 2
filter = "zero_variance"
[inference]
servers = 2
health_timeout_s = 30
start_timeout_s = 1800
max_restarts = 100
[vllm]
max-model-len = 256
max-num-seqs = 16
middleware = ["tests.faults.Faults"]
[trainer]
learning_rate = 1e-4
threads = 1
step_timeout_s = 120
[checkpoint]
every = 1
model = false
"""
PROCESSES = {  # what is killed or stopped, by what its command line holds; a router names itself so
    "server": "vllm.entrypoints.openai.api_server",
    "router": "vllm::router",
    "reward worker": "vime.workers.child",
    "trainer": "vime.training.worker",
}
TIMES = {  # how often each kind of fault comes
    **{f"response {kind}": 8 for kind in OF_RESPONSES},
    **{f"reward {kind}": 7 for kind in OF_REWARDS},
    "reward worker killed": 8,
    "reward worker stopped": 4,
    "server killed": 4,
    "server stopped": 3,
    "router killed": 5,
    "router stopped": 2,
    "trainer killed": 3,
    "trainer stopped": 2,
    "driver killed": 4,
    "driver stopped": 3,
    "disk full": 2,
}
PATIENCE_S = 1200  # for a step after a fault; two cores that do other things too need many minutes to start two servers
DISK_MB = 24


class Broken(Exception):
    """The run did not stand a fault."""


class Chaos:
    """The run, its processes and what was done to them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.run_dir, self.faults = folder, folder / "run", folder / "faults"
        self.chance = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.resumes = 0
        self.driver: subprocess.Popen[bytes] | None = None
        self.log = folder / "driver.log"

    def prepare(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        self.faults.mkdir(parents=True)
        make_model(self.folder / "model", "tied")
        rows = [json.dumps({"prompt": f"prompt {i}", "answer": "x"}) for i in range(50)]
        (self.folder / "prompts.jsonl").write_text("\n".join(rows))
        (self.folder / "config.toml").write_text(CONFIG.format(folder=self.folder))

    def start(self) -> None:
        words = ["--resume"] if Checkpoints(self.run_dir / "checkpoints", 2).steps() else []
        self.resumes += bool(words)
        command = [sys.executable, "-m", "vime.cli", "train", str(self.folder / "config.toml")]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), FOLDER: str(self.faults)}
        with self.log.open("ab") as output:
            self.driver = subprocess.Popen(
                [*command, "--run.dir", str(self.run_dir), *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def step(self) -> int:
        """The step of the newest checkpoint."""
        return max(Checkpoints(self.run_dir / "checkpoints", 2).steps(), default=0)

    def progress(self) -> None:
        """Waits until the run has gone on by two checkpoints, resuming it as often as it ends."""
        assert self.driver
        target, deadline = self.step() + 2, time.monotonic() + PATIENCE_S
        while self.step() < target:
            if self.driver.poll() is not None:
                print(f"    ended with {self.driver.returncode}: {last_line(self.log)}", flush=True)
                if self.driver.returncode not in (2, -signal.SIGKILL):  # what ends it is said, and no traceback
                    raise Broken(f"the driver ended with {self.driver.returncode}; see {self.log}")
                self.start()
            if time.monotonic() > deadline:
                raise Broken(f"no step in {PATIENCE_S} s; the end of {self.log}: {last_line(self.log)}")
            time.sleep(0.1)

    def children(self, what: str) -> list[psutil.Process]:
        assert self.driver
        found = []
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(self.driver.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                    command = process.cmdline()
                    if any(PROCESSES[what] in word for word in command) and "supervise.py" not in " ".join(command):
                        found.append(process)
        return found

    def inflict(self, fault: str) -> None:
        """One fault; returns when it has happened."""
        assert self.driver
        what, _, kind = fault.rpartition(" ")
        if what in ("response", "reward"):
            file = self.faults / f"{kind}-{sum(self.done.values()):04d}"
            file.touch()
            self.until(lambda: not file.exists(), fault)
        elif fault == "disk full":
            self.fill_disk()
        else:
            while not (victims := self.pids(what)):
                self.until(lambda: bool(self.pids(what)), fault)
            self.signal(self.chance.choice(victims), kind, what)
        self.done[fault] += 1

    def pids(self, what: str) -> list[int]:
        assert self.driver
        return [self.driver.pid] if what == "driver" else [process.pid for process in self.children(what)]

    def signal(self, pid: int, kind: str, what: str) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL if kind == "killed" else signal.SIGSTOP)
            if kind == "stopped" and what == "driver":  # nobody watches over it: the machine slept
                time.sleep(3)
                os.kill(pid, signal.SIGCONT)

    def fill_disk(self) -> None:
        """Fills the file system of the run's folder until the run ends of it, then makes room again."""
        assert self.driver
        filler = self.run_dir / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        self.until(
            lambda: self.driver is not None and self.driver.poll() is not None, "the end of a run on a full disk"
        )
        print(f"    on a full disk: {last_line(self.log)}", flush=True)
        filler.unlink(missing_ok=True)

    def until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.driver
            if self.driver.poll() is not None and "full disk" not in what:
                self.start()
            if time.monotonic() > deadline:
                raise Broken(f"waited {PATIENCE_S} s for: {what}; the end of {self.log}: {last_line(self.log)}")
            time.sleep(0.05)

    def end(self) -> None:
        """An interrupt: the run ends after its step, with a checkpoint."""
        assert self.driver
        self.driver.send_signal(signal.SIGINT)
        if code := self.driver.wait(PATIENCE_S):
            raise Broken(f"the run ended with {code}: {last_line(self.log)}")


def last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of its own for the run, small enough to fill; False where mounting one is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", folder], check=False)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", folder], check=False)


def schedule(chance: random.Random, times: dict[str, int]) -> list[str]:
    faults = [fault for fault, count in times.items() for _ in range(count)]
    chance.shuffle(faults)
    return faults


def verdict(run_dir: Path) -> dict[str, Any]:
    """What became of every prompt, by the journal and the last checkpoint."""
    counted = account(run_dir / "journal.jsonl")
    state = read_state(Checkpoints(run_dir / "checkpoints", 2).latest())
    buffered = {group for group, _ in [*state["cursor"]["buffer"], *state["cursor"]["held"]]}
    return {
        "steps": state["step"],
        "taken": counted["taken"],
        "trained": counted["trained"],
        "filtered": counted["filtered"],
        "buffered": len(buffered),
        "lost": len(set(counted["open"]) - buffered),
        "duplicated": len(counted["twice"]) + len(buffered - set(counted["open"])),
    }


def main(times: dict[str, int], folder: Path = Path("runs/chaos"), seed: int = 0) -> dict[str, Any]:
    chaos, started = Chaos(folder.absolute(), seed), time.monotonic()
    chaos.prepare()
    with small_disk(chaos.run_dir) as small:
        faults = schedule(chaos.chance, times if small else {k: v for k, v in times.items() if k != "disk full"})
        try:
            chaos.start()
            chaos.progress()
            for number, fault in enumerate(faults):
                print(f"{number + 1}/{len(faults)} step {chaos.step()}: {fault}", flush=True)
                chaos.inflict(fault)
                chaos.progress()
            chaos.end()
            found = verdict(chaos.run_dir)
        finally:
            if chaos.driver and chaos.driver.poll() is None:
                chaos.driver.kill()
                chaos.driver.wait()
    summary = {
        "faults": dict(sorted(chaos.done.items())),
        "inflicted": chaos.done.total(),
        "resumes": chaos.resumes,
        **found,
        "seconds": round(time.monotonic() - started),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    return summary


if __name__ == "__main__":
    asked = {fault: count for fault, count in TIMES.items() if fault.startswith(tuple(sys.argv[1:] or [""]))}
    result = main(asked or sys.exit(f"no such fault; they are: {', '.join(TIMES)}"))
    sys.exit(bool(result["lost"] or result["duplicated"]))
