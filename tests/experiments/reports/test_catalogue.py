"""The list of experiments and the page of their results."""

import base64
import html.parser
import re

from experiments.reports import catalogue
from experiments.reports.reporting import closing
from scripts.house import ROOT


def test_every_experiment_is_listed_with_commands_that_exist():
    programs = {p.stem for p in (ROOT / "experiments").glob("*.py")}
    assert programs - set(catalogue.ENTRIES) == {"llm_pq_quality"}  # it needs several trained runs
    order = list(catalogue.ENTRIES)
    for name, entry in catalogue.ENTRIES.items():
        assert len(f"{entry.paper}{entry.about}") < 110 and entry.commands
        assert all(order.index(other) < order.index(name) for other in entry.needs)
        for command in entry.commands:
            assert command.startswith(f"experiments/{name}.py") and "{out}/" in command


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.sources, self.text = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_needs_no_other_file_and_shows_what_was_printed(tmp_path):
    (tmp_path / "flux").mkdir()
    (tmp_path / "flux/a.svg").write_text("<svg><script>alert(1)</script></svg>")
    (tmp_path / "flux/b.svg").write_text("<svg></svg>")
    (tmp_path / "flux/b.png").write_bytes(b"png")
    log = tmp_path / "flux.log"
    log.write_text("\n".join(["no", *map(str, range(14)), "<script>alert(2)</script>"]))
    outcomes = [
        catalogue.Outcome("flux", "ok", 2, log, (tmp_path / "flux",)),
        catalogue.Outcome("plan", "failed with exit code 2", 3, tmp_path / "none"),
    ]
    page = Page(catalogue.page(outcomes, "a <title>"))
    shown = "".join(page.text)
    assert "script" not in page.tags and "<script>alert(2)</script>" in shown
    assert "failed with exit code 2" in shown and "no\n0\n" not in shown
    assert all(re.match("#|data:image/(svg|png)", source) for source in page.sources)
    pictures = [s.partition("base64,")[2] for s in page.sources if s.startswith("data:")]
    assert sorted(map(base64.b64decode, pictures)) == [
        b"<svg><script>alert(1)</script></svg>",
        b"png",
    ]


def test_the_closing_line():
    assert closing("tiny") == "tiny: shows that it runs, no claim is judged"
    line = closing("paper", paper="2 times", ours="1.9 times", source="simulated, H100")
    assert line == "paper 2 times, ours 1.9 times (simulated, H100)"
