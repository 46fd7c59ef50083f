"""What a captured method does to its object, beside the same method called at every step."""

import functools
import logging
import math
from collections import Counter, defaultdict, deque

import pytest
import torch
from torch.func import functional_call

import zerofn
from zerofn.integrations.conditional_expressions import named_by_users
from zerofn.integrations.effects import Effects


class Meter:
    def __init__(self):
        self.sum, self.n, self.mean = 0.0, 0, None

    def update(self, value, n=1):
        self.sum += value * n
        self.n += n
        self.mean = self.sum / self.n


class Base:
    """A framework's class: what its own methods do is left alone."""

    def __init__(self):
        self.logged = []

    def log(self, values, step=None):
        self.logged.append((values, step))


class Host(Base):
    def __init__(self):
        super().__init__()
        self.values, self.tensors, self.last = [], [], None
        self.count, self.total, self.best, self.rounds = 0, 0.0, float("inf"), 0
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self.stats, self.counter, self.window = {"n": 0}, Counter(), deque(maxlen=2)
        self.mean, self.meter, self.scale, self.names = torch.zeros(2), Meter(), 2.0, ("a", "b")

    def loss(self, y):
        return y.square().mean() * self.scale


class Appends(Host):
    def compute_loss(self, model, x):
        y = model(x)
        loss = self.loss(y)
        self.values.append(loss.item())
        self.tensors += [loss, {"y": y.detach()}]
        self.last = y.tolist()
        self.window.append((loss.item() + 1) // 0.5)
        for k, name in enumerate(self.names):
            self._metrics["train"][name].append(round(loss.item() * k, 3))
        self.stats.setdefault("all", []).extend([math.exp(loss.item()), float(loss.detach())])
        return loss


class Counts(Host):
    def compute_loss(self, model, x):
        y = model(x)
        loss = self.loss(y)
        self.count += 1
        self.total += loss.item()
        self.best = min(self.best, loss.item())
        self.stats["n"] += 1
        self.stats["sum"] = self.stats.get("sum", 0.0) + loss.item()
        self.counter.update(seen=len(x))
        self.mean = torch.lerp(self.mean, y.detach().mean(0), 0.1)
        self._metrics["train"]["count"] = [self.count, self.mean.sum().item()]
        self.meter.update(loss.item(), len(x))
        return loss


class Chooses(Host):
    def __init__(self):
        super().__init__()
        self.limit = 0.2

    def compute_loss(self, model, x):
        loss = self.loss(model(x))
        self.add("share", (loss / x.abs().sum()).item() if loss > self.limit else 0.0)
        n = (x > 0.5).sum().item()
        self.add("ratio", loss.item() / n if n > 0 else -1.0)
        return loss

    def add(self, name, value, mode=None):
        self._metrics["train" if mode is None else mode][name].append(value)

    def loss(self, y):
        return super().loss(y) if self.names else y.sum()


class Logs(Host):
    def compute_loss(self, model, x):
        loss = self.loss(model(x))
        self.log({"own": loss.item()}, step=3)
        return loss


def build():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 2)


def batches():
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(4, 4, generator=draw) * k for k in (1, 0.1, 2)]


def eagerly(host, parts):
    model = build()
    tx = torch.optim.SGD(model.parameters(), lr=0.1)
    for x in batches():
        for part in x.chunk(parts):
            (host.compute_loss(model, part) / parts).backward()
        tx.step()
        tx.zero_grad()
    return host


def captured(host, parts=1):
    model, effects = zerofn.skeleton(build), Effects(host, "compute_loss", Base, ["log"])

    def loss_fn(params, x):
        with effects.recording() as recording:
            loss = recording.plain(host.compute_loss(lambda x: functional_call(model, params, (x,)), x))
        return loss, recording.results

    def train_step(state, x):
        vg = zerofn.value_and_grad(loss_fn, has_aux=True)
        (_, results), grads = (zerofn.accumulate(vg, parts) if parts > 1 else vg)(state.params, x)
        return state.apply_gradients(grads), results

    params = {name: x.detach() for name, x in build().named_parameters()}
    state = zerofn.shard(zerofn.TrainState.create(params=params, tx=zerofn.optim.sgd(0.1)))
    step = zerofn.compile(train_step)
    for x in batches():
        before = {name: value for name, value in vars(host).items() if name != "_zerofn_written"}
        step.lower(state, x)
        assert all(vars(host)[name] is value for name, value in before.items()), "the capture has left something"
        state, results = step(state, x)
        effects.replay(results, parts if parts > 1 else None)
    return host


def assert_alike(found, expected, where="host"):
    assert type(found) is type(expected), (where, found, expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected.detach(), msg=where)
        assert not found.requires_grad
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for name, value in expected.items():
            assert_alike(found[name], value, f"{where}[{name!r}]")
    elif isinstance(expected, list | tuple | deque):
        assert len(found) == len(expected), (where, found, expected)
        for k, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert_alike(a, b, f"{where}[{k}]")
    elif isinstance(expected, Meter):
        assert_alike(vars(found), vars(expected), where)
    else:
        assert found == pytest.approx(expected, rel=1e-6) if isinstance(expected, float) else found == expected, where


@pytest.mark.part(parts=[2])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", [Appends, Counts, Chooses, Logs])
def test_what_a_method_does_is_done_after_every_step(kind, parts, caplog):
    caplog.set_level(logging.INFO, "zerofn")
    found, expected = captured(kind(), parts), eagerly(kind(), parts)
    found.__dict__.pop("_zerofn_written")
    assert_alike(vars(found), vars(expected))
    assert type(found) is kind
    again = [x for x in caplog.messages if ": captured again (" in x]
    assert kind is Logs or again == [], "a step that counts is not captured anew"


def test_what_the_step_goes_on_with_and_changes_is_a_sentence():
    def in_loss(self, model, x):
        self.count += 1
        return self.loss(model(x)) / self.count

    def in_branch(self, model, x):
        self.count += 1
        if self.count % 2 == 0:
            self.total += 1
        return self.loss(model(x))

    def length(self, model, x):
        self.values.append(1)
        if len(self.values) > 2:
            self.values.pop(0)
        return self.loss(model(x))

    def read(self, model, x):
        loss = self.loss(model(x))
        self.tensors.append(loss.detach())
        self.last = torch.stack(self.tensors).mean()
        return loss

    def new_entry(self, model, x):
        if "a" not in self.stats:
            self.stats["a"] = []
        return self.loss(model(x))

    def flag(self, model, x):
        if self.last is None:
            self.last = 3
        return self.loss(model(x))

    cases = {in_loss: "self.count", in_branch: "self.count", length: "self.values", read: "self.tensors",
             new_entry: "self.stats", flag: "self.last"}  # fmt: skip
    for method, name in cases.items():
        kind = type("Refused", (Host,), {"compute_loss": method})
        with pytest.raises(zerofn.CaptureError, match=f"compute_loss reads {name} and changes it") as error:
            captured(kind())
        assert f"{__file__}:" in "".join([str(error.value), *error.value.__notes__]), name


def test_what_cannot_be_done_after_the_step_is_a_sentence_with_the_line():
    others = []

    def branches(self, model, x):
        loss = self.loss(model(x))
        if loss.item() > 1:
            self.count += 1
        return loss

    def gives_away(self, model, x):
        loss = self.loss(model(x))
        others.append(loss.item())
        return loss

    for method, sentence in {
        branches: "branch on data",
        gives_away: "passes it to an object outside the module",
    }.items():
        kind = type("Refused", (Host,), {"compute_loss": method})
        with pytest.raises(zerofn.CaptureError, match=sentence) as error:
            captured(kind())
        assert f"{__file__}:{method.__code__.co_firstlineno + 2}" in str(error.value)


class Prints(Host):
    def compute_loss(self, model, x):
        loss = self.loss(model(x))
        print(f"{loss.item():.3f} {float(loss)} {loss.item() + 1!r} {round(loss.item(), 2)}", "%.2f" % loss.item())  # noqa: UP031
        return loss


def test_a_text_of_a_number_says_that_there_is_none_and_is_told(caplog, capsys):
    captured(Prints())
    none = "<no value yet>"
    assert capsys.readouterr().out.splitlines()[0] == f"{none} {none} {none} {none} nan"
    told = [x for x in caplog.messages if "has no value yet" in x]
    assert len(told) == 1 and told[0].startswith(f"{__file__}:{Prints.compute_loss.__code__.co_firstlineno + 2}: "), (
        told
    )


class Gathers(Host):
    def compute_loss(self, model, x):
        loss = self.loss(model(x))
        self.values.append(zerofn.collectives.all_gather(loss.detach()[None]).mean().item())
        self.tensors.append(loss)
        return loss


def on_rank():
    host = captured(Gathers())
    return host.values, zerofn.collectives.all_gather(torch.stack(host.tensors)[None])


@pytest.mark.whole
def test_ranks_gather_inside(ranks):
    values, each = ranks(2, on_rank)[0]
    torch.testing.assert_close(torch.tensor(values), each.mean(0), rtol=1e-6, atol=0)


class Helper:
    def reads(self):
        return self.of_helper

    def __call__(self):
        return self.of_call


def reads(host):
    return host.of_function


def passed(host):
    return host.of_partial


class Reads(Base):
    prop = property(lambda self: self.of_property)

    def __init__(self):
        super().__init__()
        self.helper, self.partial = Helper(), functools.partial(passed, self)

    def start(self):
        return self.prop, reads(self), self.helper.reads(), self.partial(), getattr(self, "of_getattr"), self.direct  # noqa: B009

    def not_run(self):
        return self.of_another


def test_names_are_found_wherever_a_method_leads():
    named = named_by_users(Reads(), ["start"], lambda module: module == __name__)
    ways = {"of_property", "of_function", "of_helper", "of_partial", "of_getattr", "of_call", "direct"}
    assert ways <= named and "of_another" not in named
