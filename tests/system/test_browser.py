"""What notebooks show, and the site, in a real browser."""

import http.server
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

import zerofn
from tests.support.small_steps import batch_of, build, state_of, train_step_of
from tests.system.browser import chromium, contrast, look
from zerofn import optim

SITE = Path("build/site")


@pytest.fixture(scope="module")
def shown():
    """Everything that has an HTML form, by name."""
    state = state_of(build(2), 3)
    step = zerofn.compile(train_step_of(build(2)))
    plan = step.lower(state, batch_of())
    _, profile = step.profile(state, batch_of())
    params = {"w" * 300: torch.zeros(70_000), "b<&>": torch.zeros(3)}
    wide = zerofn.shard(zerofn.TrainState.create(params=params, tx=optim.adamw(1e-3)))
    plain = zerofn.TrainState.create(params=dict(build(2).named_parameters()), tx=optim.adamw(1e-3))
    table = zerofn.plan(train_step_of(build(2)), lambda: plain, batch_of(), machine="A100-8")
    found = {"state": wide, "sharded": wide.params, "plan": plan, "profile": profile, "table": table}
    return {name: x._repr_html_() for name, x in found.items()}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", ["state", "sharded", "plan", "profile", "table"])
def test_what_a_notebook_shows(shown, name, dark, tmp_path):
    seen = look(f"<div>{shown[name]}</div>", tmp_path, width=700, dark=dark)
    assert seen["wide"] == [] and seen["empty"] == [] and seen["broken"] == []
    assert seen["colours"] and min(contrast(*pair) for pair in seen["colours"]) >= 4.5
    assert all(len({len(row) for row in rows}) == 1 for rows in seen["tables"])


@pytest.fixture(scope="module")
def site():
    """The site at an address of this machine; what was asked for that is not there."""
    missing = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def send_error(self, code, *_):
            missing.append((code, self.path))
            super().send_error(code)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=SITE)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", missing
        server.shutdown()


def test_every_page_of_the_site_opens_without_a_network(site):
    address, missing = site
    pages = sorted(p.relative_to(SITE) for p in SITE.rglob("*.html") if p.name != "404.html")
    assert len(pages) > 15
    for page in pages:
        seen = chromium("--dump-dom", f"{address}/{page}")
        assert "<h1" in seen and "</html>" in seen, page
    assert missing == []
