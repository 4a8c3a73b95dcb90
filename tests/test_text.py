import subprocess
import sys

from doubly.text import (
    duration,
    escape_csv,
    escape_html,
    escape_latex,
    escape_markdown,
    escape_terminal,
    format_mean_sd,
    format_percent,
    format_radius,
    format_value,
    method_label,
    printable,
    printable_lines,
    shorten,
)


def test_numbers_and_names_are_printed():
    for text, expected in [
        (duration(45), "45 s"),
        (duration(89.4), "89 s"),
        (duration(100), "2 min"),
        (duration(5399), "90 min"),
        (duration(7200), "2.0 h"),
        (duration(259_200), "3 days"),
        (format_percent(0.4634), "46.3"),
        (format_percent(0.4634, 0), "46"),
        (format_mean_sd(46.34, 0.42), "46.3 ± 0.4"),
        (format_mean_sd(46.34, None, 0), "46"),
        (format_value(1 / 3), "0.333333"),
        (format_value(None), "None"),
        (format_radius(8 / 255), "8/255"),
        (format_radius(1.0), "255/255"),
        (format_radius(0.15), "0.15"),
        (format_radius(0.0), "0"),
        (method_label("cifar10.imbalanced.done_pgd"), "DONE-PGD"),
        (method_label("run"), "RUN"),
    ]:
        assert text == expected


def test_text_from_data_is_escaped_for_each_output_format():
    for text, expected in [
        (printable("a\x1b[2J\n\ud83d"), "a?[2J??"),
        (escape_terminal("[red]x[/]\x1b"), "\\[red]x\\[/]?"),
        (escape_markdown("a|b\n<i> *x* _y_ `z` [u] \\"), r"a\|b \<i\> \*x\* \_y\_ \`z\` \[u\] " + "\\\\"),
        (escape_latex("5 % & $x_1 ~^\\{}\n±ε"), r"5 \% \& \$x\_1 \textasciitilde{}\textasciicircum{}\textbackslash{}"
         r"\{\} $\pm$$\varepsilon$"),
        (escape_latex("[b]"), "{[}b{]}"),
        (printable_lines("one\x1b[2J\ntwo\r"), "one?[2J\ntwo?"),
        (escape_csv("=1+1"), "'=1+1"),
        (escape_csv("cat = 1"), "cat = 1"),
        (escape_html("<b a=\"1\" c='2'>&"), "&lt;b a=&#34;1&#34; c=&#39;2&#39;&gt;&amp;"),
        (shorten("new\nline\x00"), "new line"),
        (shorten("\x00"), "?"),
        (shorten("a" * 30 + "b" * 30, 10), "aaaaaa…bbb"),
    ]:  # fmt: skip
        assert text == expected


def test_text_metric_names_rundir_report_and_watch_do_not_import_torch():
    modules = "doubly.text, doubly.metric_names, doubly.rundir, doubly.report, doubly.cli.watch"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
