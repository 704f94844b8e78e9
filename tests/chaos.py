"""``make chaos``: a short real run that is broken in every way, a hundred times and more, and the proof that it lost nothing.

A driver, two vLLM servers behind the router, a trainer and reward workers train a tiny model asynchronously. A seeded schedule
of faults breaks one of them after another, at any moment of a step: processes are killed or stopped, some of them while a
checkpoint is being written, answers cut, spoilt or garbled, rewards raise, hang or eat memory, the disk fills up. A run that
ends is resumed. At the end the journal and the last checkpoint must account for every prompt drawn: trained once, filtered
with a reason, or in the buffer; and each epoch must have drawn every task once.

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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.faults import FOLDER, OF_RESPONSES, OF_REWARDS
from tests.tiny import make_model
from vime.checkpoint import Checkpoints, read_state
from vime.data.journal import tally
from vime.observe.metrics import read_run

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
    **{f"response {kind}": 7 for kind in OF_RESPONSES},
    **{f"reward {kind}": 6 for kind in OF_REWARDS},
    "reward worker killed": 8,
    "reward worker stopped": 4,
    "server killed": 4,
    "server stopped": 2,
    "router killed": 5,
    "router stopped": 2,
    "trainer killed": 2,
    "trainer stopped": 1,
    "trainer killed while saving": 2,
    "driver killed": 2,
    "driver stopped": 3,
    "driver killed while saving": 3,
    "disk full": 2,
}
WHILE_SAVING = " while saving"  # when such a fault comes: once a checkpoint's draft is there
PROMPTS = 50
LONGEST_DELAY_S = 5.0  # of a fault, after a checkpoint
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
        rows = [json.dumps({"prompt": f"prompt {i}", "answer": "x"}) for i in range(PROMPTS)]
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

    def ended(self) -> bool:
        return self.driver is not None and self.driver.poll() is not None

    def progress(self) -> None:
        """Waits until the run has gone on by two checkpoints, resuming it as often as it ends."""
        target = self.step() + 2
        self.until(lambda: self.step() >= target, f"step {target}")

    def resume(self) -> None:
        """Starts the run again where it has ended; Broken where it ended otherwise than it should."""
        assert self.driver
        if (code := self.driver.poll()) is None:
            return
        print(f"    ended with {code}: {last_line(self.log)}", flush=True)
        if code not in (2, -signal.SIGKILL):  # what ends it is said, and no traceback
            raise Broken(f"the driver ended with {code}; see {self.log}")
        self.start()

    def saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.run_dir / "checkpoints").glob("step-*.tmp"))

    def delay(self) -> None:
        """Waits for a part of a step: else every fault would come when a checkpoint has just become final."""
        seconds = read_run(self.run_dir).steps[-1][1]["time/step"] or 0.0
        time.sleep(self.chance.uniform(0, min(seconds, LONGEST_DELAY_S)))

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
        what, _, kind = fault.removesuffix(WHILE_SAVING).rpartition(" ")
        if what in ("response", "reward"):
            file = self.faults / f"{kind}-{sum(self.done.values()):04d}"
            file.touch()
            self.until(lambda: not file.exists(), fault)
        elif fault == "disk full":
            self.fill_disk()
        else:
            victims: list[int] = []

            def at_hand() -> bool:
                victims[:] = self.pids(what)
                return bool(victims) and (self.saving() or not fault.endswith(WHILE_SAVING))

            self.until(at_hand, fault)
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
        filler = self.run_dir / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        self.until(self.ended, "the end of a run on a full disk", resume=False)
        print(f"    on a full disk: {last_line(self.log)}", flush=True)
        filler.unlink(missing_ok=True)

    def until(self, condition: Callable[[], bool], what: str, resume: bool = True) -> None:
        """Waits for the condition; meanwhile the run is resumed as often as it ends."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if resume:
                self.resume()
            if time.monotonic() > deadline:
                raise Broken(f"waited {PATIENCE_S} s for: {what}; the end of {self.log}: {last_line(self.log)}")
            time.sleep(0.02)

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


def journal_until(state: dict[str, Any], run_dir: Path) -> list[dict[str, Any]]:
    """The journal up to the checkpoint of this state. What follows belongs to none: a resume takes it back."""
    content = (run_dir / "journal.jsonl").read_bytes()[: state["offsets"]["journal.jsonl"]]
    return [json.loads(line) for line in content.splitlines()]


def verdict(journal: Sequence[dict[str, Any]], state: dict[str, Any]) -> dict[str, Any]:
    """What became of every prompt, by the journal up to a checkpoint and the checkpoint's state.

    Lost: drawn and not taken, or taken and neither ended nor in the buffer. Duplicated: ended or in the buffer twice, both
    ended and in the buffer, taken but not drawn, ended but not taken. Misdealt: of two tasks, or of a wrong one.
    """
    counted, cursor = tally(journal), state["cursor"]
    tasks = {entry["group"]: entry["task"] for entry in journal if entry["event"] == "taken"}
    drawn, open_groups = range(cursor["drawn"]), set(counted["open"])
    waiting = Counter(group for group, _ in [*cursor["buffer"], *cursor["held"]])
    twice = {*counted["twice"], *(group for group, count in waiting.items() if count > 1)}
    return {
        "steps": state["step"],
        "taken": counted["taken"],
        "trained": counted["trained"],
        "filtered": counted["filtered"],
        "buffered": len(waiting),
        "lost": len((set(drawn) - tasks.keys()) | (open_groups - waiting.keys())),
        "duplicated": len(
            twice | (waiting.keys() - open_groups) | (tasks.keys() - set(drawn)) | set(counted["untaken"])
        ),
        "misdealt": len({*counted["mixed"], *misdealt(tasks, len(drawn))}),
    }


def misdealt(tasks: dict[int, str], drawn: int) -> Iterator[int]:
    """Groups whose task came twice in their epoch, which is 50 groups in a row, or is none of the first epoch's."""
    known = {tasks.get(group) for group in range(PROMPTS)}
    for first in range(0, drawn, PROMPTS):
        epoch = {group: tasks[group] for group in range(first, min(first + PROMPTS, drawn)) if group in tasks}
        times = Counter(epoch.values())
        yield from (group for group, task in epoch.items() if times[task] > 1 or task not in known)


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
                chaos.delay()
                chaos.inflict(fault)
                chaos.progress()
            chaos.end()
            state = read_state(Checkpoints(chaos.run_dir / "checkpoints", 2).latest())
            found = verdict(journal_until(state, chaos.run_dir), state)
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
    sys.exit(bool(result["lost"] or result["duplicated"] or result["misdealt"]))
