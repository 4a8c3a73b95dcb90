"""doubly doctor."""

import pytest
import torch

from doubly.attacks.compiled import PlainForward
from doubly.cli import doctor
from doubly.version import __version__


@pytest.fixture(autouse=True)
def compiler(monkeypatch):
    """Replace the compiler, which takes half a minute, by one that does nothing; return where its result can be set."""
    monkeypatch.setattr(doctor, "can_compile", lambda device: True)
    compiled = {"forward": PlainForward(torch.nn.Identity()), "message": "compiled in 1 s"}
    monkeypatch.setattr(doctor, "compile_forward", lambda model, x: tuple(compiled.values()))
    return compiled


def examine():
    return {finding.name: finding for finding in doctor.examine(try_compiler=True)}


def test_a_sound_installation_passes_and_random_numbers_stay_as_they_were(cli):
    before = torch.get_rng_state()
    code, out, err = cli("doctor")
    assert (code, err) == (0, "") and __version__ in out and out.count("ok:") == 5 and "--compile tries it" in out
    findings = examine()
    assert all(finding.is_fine for finding in findings.values()), findings
    assert findings["torch"].text == torch.__version__ and findings["threads"].text == str(torch.get_num_threads())
    assert findings["compiled network"].text.startswith("ok: equal to the uncompiled one, compiled in 1 s")
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_wrong_is_noticed(monkeypatch, cli, compiler):
    cid, load = doctor.cid, doctor.load_checkpoint

    class TooFar(doctor.PGD):
        def __call__(self, *arguments):
            return 1.01 * super().__call__(*arguments)

    def wrong_cid(*arguments):
        direction = cid(*arguments)
        return direction._replace(loss=1.001 * direction.loss)

    monkeypatch.setattr(doctor, "cid", wrong_cid)
    monkeypatch.setattr(doctor, "PGD", TooFar)
    monkeypatch.setattr(
        doctor, "load_checkpoint", lambda path: load(path)._replace(tensors={"model": {"tensor": torch.ones(10)}})
    )
    compiler |= {"forward": None, "message": "not compiled: the compiled network differs by 0.01"}
    findings = examine()
    for name in ("implicit gradient", "attack", "checkpoint", "compiled network"):
        assert not findings[name].is_fine and findings[name].text.startswith("WRONG"), name
    assert "differs by" in findings["compiled network"].text and findings["first-order term"].is_fine
    assert cli("doctor")[0] == 2


def test_a_missing_compiler_is_no_error(monkeypatch):
    monkeypatch.setattr(doctor, "can_compile", lambda device: False)
    for check in (doctor.check_compiler, doctor.check_compiled_network):
        assert check(torch.device("cpu")) == (doctor.NO_COMPILER, True)
