"""doubly doctor."""

import torch

from doubly.cli import doctor
from doubly.version import __version__


def examine():
    return {finding.name: finding for finding in doctor.examine()}


def test_a_sound_installation_passes_and_random_numbers_stay_as_they_were(cli):
    before = torch.get_rng_state()
    code, out, err = cli("doctor")
    assert (code, err) == (0, "") and __version__ in out and out.count("ok:") == 5
    findings = examine()
    assert all(finding.is_fine for finding in findings.values()), findings
    assert findings["torch"].text == torch.__version__ and findings["threads"].text == str(torch.get_num_threads())
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_wrong_is_noticed(monkeypatch, cli):
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
    monkeypatch.setattr(doctor, "folding_difference", lambda model, pairs, x: 0.01)
    findings = examine()
    for name in ("implicit gradient", "attack", "checkpoint", "folded network"):
        assert not findings[name].is_fine and findings[name].text.startswith("WRONG"), name
    assert "differ by 0.01" in findings["folded network"].text and findings["first-order term"].is_fine
    assert cli("doctor")[0] == 2
