"""The studio in a real browser. Skipped where no Chromium is found; `make test-browser` says what is missing."""

from __future__ import annotations

import json
import os
import re
import threading
import zipfile

import pytest

import fmwc
from fmwc.networks import MLP
from fmwc.studio import runs as module
from tests.studio.browser import AXE, launched, missing, watched
from tests.studio.shared import serving

if problem := missing():
    if os.environ.get("FMWC_BROWSER"):
        raise RuntimeError(problem)
    pytest.skip(problem, allow_module_level=True)

from playwright.sync_api import expect

expect.set_options(timeout=60_000)  # of a machine that is busy with other tests
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser():
    with launched() as found:
        yield found


@pytest.fixture
def page(browser, studio):
    with watched(browser, studio.host) as found:
        yield found


@pytest.fixture(scope="module")
def points(studio):
    return studio.draw(count=400, steps=20, seed=1)


@pytest.fixture(scope="module")
def digits(studio):
    return studio.draw("mnist", count=20, steps=4, seed=2)


@pytest.fixture(scope="module")
def crystals(studio):
    return studio.draw("crystals", count=3, steps=4, atoms="4-8")


def show(page, studio, view=""):
    """Open a view and wait until the page is connected."""
    page.goto(f"{studio.address}#view={view.replace('/', '%2F')}")
    expect(page.locator("main h1").first).to_be_visible()


def showing_run(page, studio, run):
    show(page, studio, f"run/{run['id']}")
    expect(page.locator(".gallery")).to_be_visible()


def showing_sample(page, studio, run, sample):
    show(page, studio, f"sample/{run['id']}/{sample}")
    expect(page.get_by_role("heading", name="Edit and rewind")).to_be_visible(timeout=100_000)


def picture(page, selector):
    return page.locator(selector).first.evaluate("canvas => canvas.toDataURL()")


def changes(page, selector, before):
    """Wait until a canvas shows something else."""
    look = "([selector, before]) => document.querySelector(selector)?.toDataURL() !== before"
    page.wait_for_function(look, arg=[selector, before])


def status(page):
    return page.locator(".gallery .status")


# ---- drawing ---------------------------------------------------------------------------------------------------------


def test_draw_then_reload(page, studio):
    show(page, studio)
    page.get_by_role("link", name="Draw with Checkerboard").click()
    page.get_by_label("How many").fill("150")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Steps").fill("40")
    page.get_by_role("button", name="Draw", exact=True).click()
    expect(page.get_by_role("heading", name="150 points, seed 7")).to_be_visible()
    expect(status(page)).to_have_text("150 samples, surest first.")
    page.reload()
    expect(status(page)).to_have_text("150 samples, surest first.")
    show(page, studio)
    expect(page.get_by_role("cell", name="150 points, seed 7")).to_be_visible()


@pytest.fixture
def slowly(monkeypatch):
    steps, watch = threading.Semaphore(0), module.Studio._watch

    def watched_steps(self, *given):
        on_step = watch(self, *given)

        def act(first, t, x):
            on_step(first, t, x)
            steps.acquire(timeout=60)

        return act

    monkeypatch.setattr(module.Studio, "_watch", watched_steps)
    monkeypatch.setattr(module, "PERIOD", 0)  # show every step
    yield steps
    steps.release(10_000)


def test_samples_appear_while_they_are_drawn_and_cancelling_works(page, browser, studio, slowly):
    show(page, studio, "draw/mnist")
    page.get_by_label("How many").fill("6")
    page.get_by_label("Steps").fill("10")
    page.get_by_role("button", name="Draw", exact=True).click()
    expect(page.locator(".preview canvas")).to_be_visible()
    expect(page.get_by_text("All are at t = 0.10")).to_be_visible()
    first = picture(page, ".preview canvas")
    slowly.release(5)
    expect(page.get_by_text(re.compile(r"t = 0\.[4-6]0"))).to_be_visible()
    changes(page, ".preview canvas", first)
    expect(page.get_by_role("progressbar")).to_be_visible()
    page.reload()  # the run goes on
    expect(page.get_by_role("button", name="Cancel")).to_be_visible()
    with watched(browser, studio.host) as other:  # and another page sees it
        show(other, studio)
        expect(other.get_by_role("cell", name=re.compile("drawing"))).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    slowly.release(10_000)
    expect(page.get_by_text("This run was cancelled.")).to_be_visible()
    page.get_by_role("button", name="Resume").click()
    expect(status(page)).to_have_text("6 samples, surest first.")


# ---- gallery ---------------------------------------------------------------------------------------------------------


def test_sort_filter_and_find(page, studio, digits):
    table, tensors = studio.get(f"runs/{digits['id']}/table")["columns"], studio.tensors(f"runs/{digits['id']}/samples")
    showing_run(page, studio, digits)
    heading = page.locator(".detail h2")
    expect(heading).to_contain_text(f"Sample {table['name'][tensors['order'][0]]}")
    page.get_by_label("Sort by").select_option(label="margin over the rival")
    page.locator(".gallery .view").press("Home")
    least = min(range(20), key=lambda i: table["margin"][i])
    expect(heading).to_contain_text(f"Sample {table['name'][least]}")
    page.get_by_role("button", name="Reverse the order").click()
    page.locator(".gallery .view").press("Home")
    most = max(range(20), key=lambda i: table["margin"][i])
    expect(heading).to_contain_text(f"Sample {table['name'][most]}")
    failed = int((tensors["failed"] == 1).sum())
    page.get_by_label("Show").select_option("failed")
    expect(status(page)).to_have_text(f"{failed} of 20 samples.")
    page.get_by_label("Show").select_option("all")
    page.get_by_label("Find by text").fill("00013")
    expect(status(page)).to_have_text("1 of 20 samples.")


# ---- one sample ------------------------------------------------------------------------------------------------------


def test_edit_then_undo(page, studio, points):
    sample = int(studio.tensors(f"runs/{points['id']}/samples")["order"][-2])
    showing_sample(page, studio, points, sample)
    page.get_by_role("button", name="Go to t = 0.25").click()
    page.get_by_label("Strength").fill("0.6")
    page.get_by_role("button", name="Edit from here").click()
    pair = page.get_by_label("Before and after the edit")
    expect(pair).to_be_visible(timeout=60_000)
    expect(pair.locator("figure")).to_have_count(2)
    run = next(one for one in studio.state()["runs"] if one["parent"] == {"run": points["id"], "sample": sample})
    both = studio.get(f"runs/{run['id']}")["pair"]
    for side, name in ((0, "before"), (1, "after")):
        level = float(f"{both[name]['confidence']:.3g}")
        expect(pair.locator("figcaption").nth(side)).to_contain_text(f"confidence {level:g}")
        expect(pair.locator("figcaption").nth(side)).to_contain_text(both[name]["verdict"])
    expect(page.get_by_label("History")).to_contain_text("noise 0.6 at t = 0.25")
    expect(page.get_by_role("heading", name="Edit and rewind")).to_be_visible(timeout=60_000)  # it can be edited again
    page.get_by_role("button", name=re.compile("Undo")).click()
    expect(page.get_by_role("heading", name=f"Sample {sample:05d}")).to_be_visible()
    expect(page.get_by_label("History").get_by_role("link", name="noise 0.6 at t = 0.25")).to_be_visible()


# ---- export ----------------------------------------------------------------------------------------------------------


def test_export_and_download(page, studio, digits, tmp_path):
    showing_run(page, studio, digits)
    page.get_by_label("Keep the surest", exact=True).fill("25")
    page.locator("h1").click()
    page.keyboard.press("e")
    dialog = page.get_by_role("dialog", name="Export the surest 5 of 20")
    recipe = studio.post(f"runs/{digits['id']}/recipe", {"kept": 5})
    expect(dialog.get_by_label("Command")).to_have_text(recipe["command"])
    expect(dialog.get_by_label("Python")).to_have_text(recipe["python"])
    dialog.get_by_role("button", name="Export").click()
    expect(dialog.get_by_text("Written to")).to_be_visible()
    with page.expect_download() as waiting:
        dialog.get_by_role("button", name="Download as zip").click()
    waiting.value.save_as(tmp_path / "kept.zip")
    names = zipfile.ZipFile(tmp_path / "kept.zip").namelist()
    assert {"samples/samples.csv", "samples/digits.png", "samples/samples.safetensors"} <= {*names}


# ---- safety and failures ---------------------------------------------------------------------------------------------


def test_text_from_files_is_text(browser, tmp_path):
    field = fmwc.attach(MLP(dim=2, hidden=8, depth=1), space=(2,))
    run = fmwc.sample(field, 4, steps=3, seed=0)
    run.save(tmp_path / "samples.safetensors")
    evil = "<img src=x onerror='document.title=1'>"
    lines = [f'{name},"{evil}",{i % 2}' for i, name in enumerate(run.names)]
    (tmp_path / "samples.csv").write_text("\n".join([f'name,"{evil}",bad', *lines]) + "\n")
    with (
        serving(tmp_path / "studio", str(tmp_path / "samples.safetensors")) as client,
        watched(browser, client.host) as page,
    ):
        page.goto(client.address)
        expect(page.locator(".detail dd").first).to_have_text(evil)
        assert page.locator(".detail img").count() == 0
        assert page.title() != "1"


# ---- every view ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def views(studio, points, digits, crystals):
    edit = studio.edit(points, 5, scale=0.3)
    for run in (points, digits, crystals):
        studio.trace(run, 1)
    studio.trace(edit, 0)
    return {
        "start": "",
        "draw": "draw/mnist",
        "points": f"run/{points['id']}",
        "digits": f"run/{digits['id']}",
        "crystals": f"run/{crystals['id']}",
        "point": f"sample/{points['id']}/1",
        "digit": f"sample/{digits['id']}/1",
        "crystal": f"sample/{crystals['id']}/1",
        "edit": f"sample/{edit['id']}/0",
        "missing": "run/000000000000",
    }


@pytest.mark.parametrize(
    "theme",
    [
        "light",
        "dark",
    ],
)
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_views_are_accessible_and_fit(browser, studio, views, size, theme):
    with watched(browser, studio.host, viewport=size, color_scheme=theme, reduced_motion="reduce") as page:
        found = {}
        for name, view in views.items():
            show(page, studio, view)
            if view.startswith("sample"):
                expect(page.get_by_role("heading", name="Edit and rewind")).to_be_visible()
            elif view.startswith("run") and name != "missing":
                expect(status(page)).to_be_visible()
            page.evaluate(AXE.read_text())
            results = page.evaluate("axe.run(document, {resultTypes: ['violations']})")
            found |= {
                f"{name}: {one['id']} {node['target']}": node["failureSummary"]
                for one in results["violations"]
                for node in one["nodes"]
            }
            if page.evaluate("document.documentElement.scrollWidth") > size["width"]:
                found[name] = "wider than the window"
        assert not found, json.dumps(found, indent=1)
