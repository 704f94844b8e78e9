"""How long the mirror of 1,000 Python files takes: from nothing, again, and after a change of one file.

    python benchmarks/forksync_mirror.py

The files are those of transformers' models, 18 MB; the table renames a package, two identifiers in all places, and a word by a
regular expression, 31,000 uses.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

from forksync.git import Entry, Repository
from forksync.mirror import mirror
from forksync.table import parse

FILES = 1000
NONE = [{"before": "", "after": ""}]
EVERYWHERE = ["names", "attributes", "keywords", "imports", "literals", "strings", "comments", "text"]
RULES = [
    {"kind": "package", "from": "transformers", "to": "metamorph"},
    {"kind": "identifier", "from": "hidden_states", "to": "states", "places": EVERYWHERE},
    {"kind": "identifier", "from": "AutoConfig", "to": "AutoSettings", "places": EVERYWHERE},
    {"kind": "regex", "from": "Licensed under", "to": "Given under"},
]


def commit(repository: Repository, files: dict[str, bytes]) -> None:
    blobs = repository.write_blobs(list(files.values()))
    tree = repository.write_tree(Entry("100644", blob, path) for path, blob in zip(files, blobs, strict=True))
    repository.set_ref("refs/heads/main", repository.write_commit(tree, [], "files\n", "@1700000000 +0000"))


def main() -> None:
    rules = [{**rule, "name": f"{rule['kind']} {rule['from']}", "examples": NONE} for rule in RULES]
    table = parse({"rule": rules}, "", Path("table.toml"))
    spec = find_spec("transformers")
    assert spec and spec.origin
    root = Path(spec.origin).parent
    paths = sorted(root.joinpath("models").rglob("*.py"))[:FILES]
    files = {f"src/transformers/{path.relative_to(root)}": path.read_bytes() for path in paths}
    print(f"{len(files)} files, {sum(map(len, files.values())) / 1e6:.1f} MB")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "init", "-q", "-b", "main", folder], check=True, timeout=60)
        repository = Repository(Path(folder))
        commit(repository, files)
        for what in ("from nothing", "again", "one file changed"):
            if what == "one file changed":
                commit(repository, {**files, next(iter(files)): b"import transformers\n"})
            started = time.perf_counter()
            made = mirror(repository, "main", table)
            seconds = time.perf_counter() - started
            print(f"{what:17} {seconds:6.2f} s, {made.translated} translated, {made.uses.total()} uses")


if __name__ == "__main__":
    main()
