"""The page of all benchmarks, made from their stored results, without torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from growth_figure import TITLES, draw, table
from lines import Line, shown
from ratio_figure import draw_ratios

Results = Mapping[str, Mapping[str, Any]]  # part -> title, conditions, outcome or problem

HEAD = """# Benchmarks

This page is written by `python benchmarks/run.py` from [{json}]({json}); no number is typed by hand.
The contestants of a part take turns within one run, and each round begins with the next of them, so that a noisy
machine disturbs all alike. A line shows the median of the ratios of the rounds with a 95 % interval (bootstrap of the
rounds), and is judged by the median. Parts start only on an idle machine, or say that it was loaded. `--only` measures
single parts again; the results of every commit that was measured stay in the folder `{folder}/history`.

![ratios with their aims]({folder}/ratios.png)
"""


def page(results: Results, folder: str) -> str:
    """Return the page in Markdown; pictures and results are in the folder `folder` next to it."""
    parts = [section(name, result, folder) for name, result in results.items()]
    head = HEAD.format(json=f"{folder}/results.json", folder=folder)
    return "\n".join([head, summary(results), "", *parts])


def summary(results: Results) -> str:
    """Return how many aims are met, and which are not."""
    judged: dict[str, list[str]] = {"met": [], "MISSED": [], "not measured": []}
    for result in results.values():
        for line in lines(result):
            verdict = shown(line, result["conditions"]["quick"])[3]
            if line.aim is not None and verdict in judged:
                judged[verdict].append(f"{line.what} ({result['title']})")
    count = sum(map(len, judged.values()))
    sentences = [f"**{len(judged['met'])} of {count} aims met.**"]
    for verdict, beginning in (("MISSED", "Missed"), ("not measured", "Not measured")):
        if judged[verdict]:
            sentences.append(f"{beginning}: {'; '.join(judged[verdict])}.")
    broken = [result["title"] for result in results.values() if result.get("problem")]
    if broken:
        sentences.append(f"Parts that broke off: {'; '.join(broken)}.")
    if any(result["conditions"]["quick"] for result in results.values()):
        sentences.append("**Parts marked quick are tiny: they show that the program works, and measure nothing.**")
    return " ".join(sentences)


def lines(result: Mapping[str, Any]) -> list[Line]:
    stored = (result.get("outcome") or {}).get("lines", [])
    return [Line(**{**line, "values": tuple(line["values"])}) for line in stored]


def section(name: str, result: Mapping[str, Any], folder: str) -> str:
    outcome = result.get("outcome") or {}
    text = [f"## {result['title']}", "", conditions(result["conditions"], outcome.get("sizes", "")), ""]
    if result.get("problem"):
        text += [f"**Broke off:** {cell(result['problem'])}", ""]
    if outcome.get("lines"):
        text += ["| | median | 95 % interval | aim | |", "| --- | ---: | ---: | ---: | --- |"]
        text += [row(line, result["conditions"]["quick"]) for line in lines(result)] + [""]
    if outcome.get("seconds"):
        text += [f"Seconds, medians: {', '.join(f'{k} {v:.3f}' for k, v in outcome['seconds'].items())}.", ""]
    for note in outcome.get("notes", []):
        text += [note, ""]
    if outcome.get("curves"):
        text += growth(name, outcome["curves"], folder)
    return "\n".join(text)


def row(line: Line, quick: bool) -> str:
    median, spread, aim, verdict = shown(line, quick)
    remark = f"{verdict}: {line.note}" if line.note and verdict else verdict or line.note
    return f"| {line.what} | {median} | {spread} | {aim} | {cell(remark)} |"


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def conditions(c: Mapping[str, Any], sizes: str) -> str:
    threads = f", {c['threads']} threads" if c["threads"] > 1 else ", 1 thread" if c["threads"] else ""
    rounds = f"{c['rounds']} round{'s' if c['rounds'] > 1 else ''}"
    text = f"{sizes + '; ' if sizes else ''}{rounds}{', quick' if c['quick'] else ''}. "
    text += f"{c['machine']}, {c['cores']} cores{threads}, torch {c['torch']}; {c['date']}, {c['took']:.0f} s, "
    loaded = "; **on a loaded machine**" if c.get("loaded") else ""
    return text[:1].upper() + text[1:] + f"load at the start {c['load']:.1f}, commit {c['commit']}{loaded}."


def picture(name: str, quantity: str) -> str:
    """Return the name of a picture: growth-seconds, or growth-cuda-seconds for another device."""
    return f"{name.replace(' ', '-')}-{quantity}"


def growth(name: str, curves: Sequence[dict[str, Any]], folder: str) -> list[str]:
    text = [
        "The exponent is p of y ~ x^p, by least squares in logarithms over the upper half of the points (filled; at "
        "least three), where fixed costs weigh least.",
        "",
    ]
    for quantity, title in TITLES.items():
        text += [f"![{title}, against what grows]({folder}/{picture(name, quantity)}.png)", ""]
    return [*text, *table(curves), ""]


def write(results: Results, output: Path) -> None:
    """Write the page and its pictures."""
    folder = output.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for name, result in results.items():
        for quantity in TITLES:
            if curves := (result.get("outcome") or {}).get("curves"):
                draw(curves, quantity, folder / picture(name, quantity))
    draw_ratios(results, folder / "ratios")
    output.write_text(page(results, folder.name), encoding="utf-8")
