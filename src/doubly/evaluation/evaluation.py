"""One evaluation, from network and images to a result: attacks, AutoAttack, examples, trust."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from doubly.attacks import PGD, device_of, evaluating
from doubly.attacks.autoattack import AutoAttack
from doubly.data import Images
from doubly.data.holdout import stratified_subset as stratified
from doubly.distributed import collectives as parallel
from doubly.distributed.rank_zero import together
from doubly.errors import UsageError
from doubly.evaluation import trust
from doubly.evaluation.attacks import described, pgd20
from doubly.evaluation.autoattack.outcome import Standing
from doubly.evaluation.autoattack.reuse import KEPT, NOT_KEPT, earlier
from doubly.evaluation.autoattack.runner import Callback, Ensemble
from doubly.evaluation.config import EvalConfig
from doubly.evaluation.gallery import Gallery
from doubly.evaluation.memory import InPieces, Pieces
from doubly.evaluation.network import check_network, model_sha256
from doubly.evaluation.output import Kept, Output
from doubly.evaluation.predict import Answers, answers
from doubly.evaluation.radius_curve import curve, curve_attack
from doubly.evaluation.result import NOT_MEASURED, EvalResult
from doubly.threat import NormBall, Threat
from doubly.types import Attack


@dataclass(frozen=True, eq=False)
class Evaluation:
    model: nn.Module
    given: Images
    attacks: Mapping[str, Attack]
    ensemble: AutoAttack | None
    threat: Threat
    how: EvalConfig
    validation: Images | None = None
    watch: Callback = field(default_factory=Callback)
    about: Mapping[str, Any] = field(default_factory=dict)  # goes into the protocol
    more: Mapping[str, Any] = field(default_factory=dict)  # goes into evaluation.json beside it
    pieces: Pieces = field(default_factory=Pieces)

    @property
    def ball(self) -> NormBall | None:
        return self.threat if isinstance(self.threat, NormBall) else None

    @property
    def output(self) -> Output:
        return Output(self.how.output, self.how.save_examples, self.more)

    def run(self) -> EvalResult:
        """First whether the network is fit to be measured, then the attacks, AutoAttack last.

        Of several processes each does its share, and all return the same; the first one speaks and writes.
        """
        if parallel.world()[1] > 1:
            parallel.agree("weights", model_sha256(self.model), "give every process the same network")
            parallel.agree("images", self.given.sha256(), "give every process the same ones, in the same order")
            parallel.agree("settings", f"{self.how} {described(self.attacks)}", "give every process the same")
        watch = self.watch if parallel.world()[0] == 0 else Callback()
        return replace(self, watch=watch, pieces=Pieces(watch.say))._with_earlier()._run()

    def _with_earlier(self) -> "Evaluation":
        """Where AutoAttack is not asked for, but is done for this network and these images: with it."""
        folder, images = self.how.output, _part(self.given, self.how.images)
        if self.ensemble is not None or folder is None or self.ball is None:
            return self
        asked = earlier(folder, self.ball, len(images), self.how)
        again = self if asked is None else replace(self, ensemble=asked[0], how=asked[1])
        done = asked is not None and again._ensemble(asked[0]).finished(
            self.model, images.subset(again._attacked_rows(images))
        )
        done = bool(parallel.gather(torch.tensor([int(done)])).all())  # all processes see it, or none
        if asked is not None:
            self.watch.say(f"{asked[0].label} {KEPT if done else NOT_KEPT}")
        return again if done else self

    def _run(self) -> EvalResult:
        images, how, gallery = _part(self.given, self.how.images), self.how, Gallery()
        few = _part(images, min(how.trust_images, how.chunk))
        x, y = (part.to(device_of(self.model)) for part in (few.pixels(slice(None)), few.y))
        invariance = together(lambda: self._check(images, x, y))
        if how.sharded:
            clean = self._result(images, answers(self.model, images, {}, how.seed, how.chunk, pieces=self.pieces))
            return self._under_autoattack(images, clean)[0]
        result, examples = self._under_attacks(images, gallery)
        result = self._trusted(result, invariance, x, y)
        if how.curve_images is not None:
            pgd = curve_attack(self.attacks, self.ball)
            result = replace(result, curve=curve(self.model, _part(images, how.curve_images), pgd, how, self.pieces))
        if self.ensemble is not None:
            # Hours may pass; what an earlier evaluation found stays till this one ends.
            self.output.save(result, images, gallery, over=False)
            result, broken = self._under_autoattack(images, result)
            result = replace(result, trust=trust.completed(result.trust, result, invariance))
            examples += broken
        if examples:
            saved = self.output.examples(images, examples, x.device, self._answer)
            result = replace(result, examples={**result.examples, "saved": saved})
        self.output.save(result, images, gallery)
        return result

    def _check(self, images: Images, x: Tensor, y: Tensor) -> dict[str, float]:
        """Refuses what cannot be measured; returns by how much the answers to some images differ, asked anew."""
        how = self.how
        if how.sharded and self.ensemble is None:
            raise UsageError("a shard is a part of AutoAttack's chunks: ask for autoattack or quick as well")
        if how.sharded and parallel.world()[1] > 1:
            raise UsageError("the processes of torchrun share AutoAttack's chunks by themselves: leave out the shard")
        self.output.check(self.given.x.shape[1])
        if how.curve_images is not None:
            curve_attack(self.attacks, self.ball)
        parts = self.pieces.of(len(y), lambda start, end: check_network(self.model, x[start:end], y[start:end]))
        if self.ensemble is not None:
            self._ensemble(self.ensemble).check(self.model, images.subset(self._attacked_rows(images)))
        return {name: max(part[name] for part in parts) for name in parts[0]}

    def _under_attacks(self, images: Images, gallery: Gallery) -> tuple[EvalResult, list[Kept]]:
        how = self.how
        keep = None if how.save_examples is None else stratified(images.y, how.most_examples, seed=0)

        def done(count: int) -> None:
            self.watch.images(count, len(images))

        found = answers(
            self.model, images, self.attacks, how.seed, how.chunk, done, keep, self.ball, gallery.see, self.pieces
        )
        result = self._result(images, found)
        if self.validation is not None:
            others = _part(self.validation, how.images)
            measured = answers(self.model, others, self.attacks, how.seed, how.chunk, pieces=self.pieces)
            result = replace(result, validation=self._result(others, measured))
        if keep is None:
            return result, []
        return result, [self._kept(name, keep, points, self.attacks[name]) for name, points in found.attacked.items()]

    def _kept(self, name: str, rows: Tensor, points: Tensor, attack: Any) -> Kept:
        threat = getattr(attack, "threat", self.ball)
        return Kept(name, rows, points, threat if isinstance(threat, NormBall) else None)

    def _answer(self, x: Tensor) -> Tensor:
        asked = InPieces(self.model, self.pieces)
        with evaluating(self.model), torch.no_grad():
            return torch.cat([asked(piece).argmax(1) for piece in torch.split(x, self.how.chunk)])

    def _result(self, images: Images, found: Answers) -> EvalResult:
        protocol = {
            **described(self.attacks),
            "seed": self.how.seed,
            "chunk": self.how.chunk,
            "data_sha256": images.sha256(),
            **self.about,
        }
        return EvalResult(
            images.y.cpu().numpy(),
            _named(images.classes, max(int(given.max()) for given in found.classes.values())),
            found.classes,
            protocol,
            images.ids.cpu().numpy(),
            {name: losses for name, losses in found.losses.items() if name != "clean"},
            examples=found.examples if self.attacks else {},
            tail_share=self.how.tail_share,
            tail_rounding=self.how.tail_rounding,
            weights_r=self.how.weights_r,
            weights_normalize=self.how.weights_normalize,
            margins=found.margins,
        )

    def _trusted(self, result: EvalResult, invariance: dict[str, float], x: Tensor, y: Tensor) -> EvalResult:
        if not self.how.trust:
            return result
        pgd = self.attacks.get("pgd", None if self.ball is None else pgd20(self.ball))
        more: list[trust.Line] = []
        if isinstance(pgd, PGD) and self.ball is not None:
            attack, asked = pgd, InPieces(self.model, self.pieces)
            with parallel.alone():  # every process asks alike
                more = self.pieces.again(lambda: trust.attack_checks(asked, x, y, attack, self.how.seed))
        return replace(result, trust=trust.panel([*trust.from_result(result, invariance), *more]))

    def _attacked_rows(self, images: Images) -> Tensor:
        most = self.how.autoattack_images
        return torch.arange(len(images)) if most is None else stratified(images.y, most, seed=0).cpu()

    def _ensemble(self, attack: AutoAttack) -> Ensemble:
        how = self.how
        place = how.state or (how.output / "autoattack" if how.output else None)
        keep = 0 if how.save_examples is None else how.most_examples
        shard = how.shard if parallel.world()[1] == 1 else parallel.world()
        return Ensemble(attack, how.autoattack_chunk, how.compile, place, how.state is not None, shard, keep)

    def _under_autoattack(self, images: Images, result: EvalResult) -> tuple[EvalResult, list[Kept]]:
        """The result with AutoAttack's outcome, if all chunks are done; and some of the images that it turned."""
        attack, rows = self.ensemble or AutoAttack(), self._attacked_rows(images)
        run = self._ensemble(attack)
        standing, about = run.run(self.model, images.subset(rows), self.watch, self.pieces)
        state = about.pop("state")  # where it lies is not part of what was found
        if not standing.complete:
            return replace(result, autoattack=about), []
        if len(standing.examples) < min(run.keep, standing.broken):
            self.watch.say(
                "images that AutoAttack turned before --save-examples was given were not kept: to have them, delete "
                f"{state}"
            )
        result = _with_outcome(result, attack.name, standing, about, rows.numpy())
        turned = torch.tensor(sorted(standing.examples), dtype=torch.int64)
        if not len(turned):
            return result, []
        points = torch.stack([standing.examples[row] for row in turned.tolist()])
        return result, [self._kept(attack.name, rows[turned], points, attack)]


def _with_outcome(
    result: EvalResult, name: str, standing: Standing, about: Mapping[str, Any], rows: NDArray[Any]
) -> EvalResult:
    """`rows`: which of the result's samples AutoAttack was run on."""

    def spread(values: NDArray[Any], elsewhere: Any) -> NDArray[Any]:
        whole = np.full(result.n, elsewhere, dtype=values.dtype)
        whole[rows] = values
        return whole

    checked = {"n": 0, "asked": 0, "outside": 0, "changed": 0, "largest": None, **result.examples}
    checked |= {"n": checked["n"] + standing.made, "outside": checked["outside"] + standing.outside}
    checked["largest"] = max(checked["largest"] or 0.0, standing.largest)
    return replace(
        result,
        classes=_named(result.classes, int(standing.answers.max())),
        answers={**result.answers, name: spread(standing.answers, NOT_MEASURED)},
        after={part: spread(values, False) for part, values in standing.after.items()},
        autoattack=about,
        examples=checked,
    )


def _part(images: Images, most: int | None) -> Images:
    """At most so many, in the proportions of the classes and always the same."""
    return images if most is None or most >= len(images) else images.subset(stratified(images.y, most, seed=0))


def _named(classes: tuple[str, ...], highest: int) -> tuple[str, ...]:
    """The names of the data's classes, and numbers for others that the network answered with."""
    return (*classes, *(str(k) for k in range(len(classes), highest + 1)))
