"""The Grafana dashboard asks for metrics that there are, and has the fields that Grafana needs."""

import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request

import pytest

from megajax.monitor.sources import convert
from megajax.monitor.sources import server as server_
from megajax.systems.minder.reporter import NAMES, PREFIX
from tests import machines

FILE = machines.ROOT / "scripts" / "minder_grafana.json"
SHOWN = {n for metric in convert.WATCHED for n in server_.exporter_names(metric)}
# What a word of PromQL may be besides the name of a metric.
FUNCTIONS = {
    "sum", "max", "min", "avg", "quantile", "topk", "rate", "irate", "increase", "changes", "time",
    "timestamp", "label_replace", "label_values", "by", "and", "or", "unless", "offset",
}  # fmt: skip


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(FILE.read_text())


def expressions(dashboard):
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if "definition" in variable:
            yield variable["name"], variable["definition"]
    for annotation in dashboard["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def words(expression):
    """The names of metrics in an expression: words outside of braces, brackets and texts."""
    text = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', " ", expression)
    text = re.sub(r"by \([^)]*\)|label_values\((\w+), \w+\)", r" \1 ", text)
    return {w for w in re.findall(r"\b[a-zA-Z_]\w*", text) if w not in FUNCTIONS}


def test_every_metric_of_every_expression_exists(dashboard):
    used = set()
    for title, text in expressions(dashboard):
        assert not (unknown := words(text) - {*NAMES, *SHOWN}), (title, unknown)
        used |= words(text)
    assert {n for n in NAMES if n.startswith(PREFIX)} <= used  # all of the daemon is shown
    assert set(convert.WATCHED) <= {p["title"] for p in dashboard["panels"]}


def test_a_name_that_does_not_exist_is_noticed():
    assert words('topk(3, sum by (machine) (rate(megajax_x{job=~"$j"}[5m]))) > 1') == {"megajax_x"}
    assert words("label_values(megajax_y, job)") == {"megajax_y"}


def test_what_grafana_needs_is_there(dashboard):
    for name, kind in (
        ("title", str),
        ("uid", str),
        ("schemaVersion", int),
        ("panels", list),
        ("templating", dict),
        ("time", dict),
        ("annotations", dict),
    ):
        assert isinstance(dashboard[name], kind), name
    assert dashboard["id"] is None and len(dashboard["uid"]) <= 40  # an import makes the number
    panels = dashboard["panels"]
    assert len({p["id"] for p in panels}) == len(panels)
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}" and panel["targets"]
            refs = [t["refId"] for t in panel["targets"]]
            assert len(set(refs)) == len(refs) and panel["fieldConfig"]["defaults"]["unit"]


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.skipif("machines.is_missing()", reason=machines.NEEDED)
def test_a_real_server_can_parse_every_expression(dashboard, tmp_path):
    with machines.server(tmp_path / "server", []) as server:
        time.sleep(3)
        for title, text in expressions(dashboard):
            if not text.startswith("label_values"):
                query = urllib.parse.urlencode({"query": text.replace("$job", ".*")})
                with urllib.request.urlopen(f"{server.url}/api/v1/query?{query}") as answer:
                    assert json.load(answer)["status"] == "success", title
        with pytest.raises(urllib.error.HTTPError):  # what cannot be parsed is refused
            urllib.request.urlopen(f"{server.url}/api/v1/query?query=sum((x)")
