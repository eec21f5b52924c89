"""The report in a real browser: that it opens from the disk and asks for nothing, and that all of it works."""

from itertools import pairwise
from pathlib import Path

import pytest

from browser import chromium, requests, scheme, screen, show
from made_runs import make_run
from semclust.report import write_report

HOSTILE = "<img src=x onerror=alert(1)>.jpg"
N, N_CLUSTERS = 300, 4


@pytest.fixture(scope="module")
def html(tmp_path_factory) -> Path:
    names = [f"{i:03}.jpg" for i in range(N)]
    names[7], names[8], names[9] = HOSTILE, "</script><b>bold</b>.png", "two\nlines \udcff.png"
    names[10] = "IMG_7.PNG"
    run = make_run(tmp_path_factory.mktemp("page"), N, N_CLUSTERS, names=names, skipped=[(HOSTILE, "empty file")])
    return write_report(run.path)


@pytest.fixture(scope="module")
def browser():
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser, html):
    """The page, freshly opened; at the end of a test the console must be silent."""
    screen(browser, 1280)
    show(browser, html)
    yield browser
    assert browser.get_log("browser") == []
    assert number_of(browser, "img") == 0


def run(page, script: str, *arguments):
    return page.execute_script(script, *arguments)


def enter(page, field: str, value: str) -> str:
    """Put a value into a field of the gallery's form as a user would; what the page says to it."""
    run(
        page,
        "const f = document.getElementById(arguments[0]); f.value = arguments[1];"
        "f.dispatchEvent(new Event('input', {bubbles: true}));",
        field,
        value,
    )
    return text(page, "gallery-status")


def text(page, element: str) -> str:
    return run(page, "return document.getElementById(arguments[0]).textContent", element)


def number_of(page, selector: str) -> int:
    return run(page, "return document.querySelectorAll(arguments[0]).length", selector)


def cards(page) -> list[int]:
    return run(page, "return [...document.querySelectorAll('.card:not([hidden])')].map(c => Number(c.dataset.cluster))")


def press(page, *keys: str) -> None:
    from selenium.webdriver import ActionChains

    for key in keys:
        ActionChains(page).send_keys(key).perform()


def after_drawing(page, script: str):
    """The value of an expression once the canvas has been drawn again."""
    return page.execute_async_script(
        f"const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(() => done({script})));"
    )


def keys():
    from selenium.webdriver.common.keys import Keys

    return Keys


# ---- opening ---------------------------------------------------------------------------------------


def test_it_opens_from_the_disk_and_asks_for_nothing(page):
    assert page.current_url.startswith("file://")
    run(page, "window.scrollTo(0, document.body.scrollHeight)")
    assert after_drawing(page, "1") == 1
    assert requests(page) == []
    loaded = run(page, "return performance.getEntriesByType('resource').map(e => e.name)")
    assert all(name.startswith(("blob:", "data:")) for name in loaded)
    assert page.title == "made · semclust report"


def test_the_policy_stops_what_is_not_the_page_s_own(browser, html, tmp_path):
    """Were a name ever to become markup, it would still not run."""
    changed = tmp_path / "changed.html"
    changed.write_text(html.read_text("utf-8").replace("<h2 ", "<img src=x onerror='window.bad = 1'><h2 ", 1), "utf-8")
    show(browser, changed)
    assert browser.execute_script("return window.bad") is None
    assert any("Content Security Policy" in entry["message"] for entry in browser.get_log("browser"))


def test_landmarks_headings_and_labels(page):
    assert (
        run(
            page, "return ['header', 'nav', 'main', 'footer'].map(t => document.querySelectorAll('body > ' + t).length)"
        )
        == [1] * 4
    )
    assert number_of(page, "h1") == 1
    levels = run(page, "return [...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))")
    assert all(after <= before + 1 for before, after in pairwise(levels))
    nameless = run(
        page,
        "return [...document.querySelectorAll('button, input, select, canvas, svg[tabindex], [role=region]')]"
        ".filter(e => !e.getAttribute('aria-label') && !e.textContent.trim() && !e.closest('label'))"
        ".map(e => e.outerHTML)",
    )
    assert nameless == []
    assert run(page, "return [...document.querySelectorAll('table')].filter(t => !t.caption).length") == 0
    targets = run(page, "return [...document.querySelectorAll('nav a')].map(a => !!document.querySelector(a.hash))")
    assert len(targets) == 7 and all(targets)


# ---- gallery ---------------------------------------------------------------------------------------


def test_the_largest_cluster_is_first_and_frames_say_right_or_wrong(page):
    sizes = run(page, "return CLUSTERS.map(c => c.size)")
    assert sizes == sorted(sizes, reverse=True) and cards(page) == [0, 1, 2, 3]
    for number, kind, label in run(
        page,
        "return [...document.querySelectorAll('.shot')].map(s => [Number(s.dataset.number), s.className, s.ariaLabel])",
    ):
        right = run(page, "return IMAGES.right[arguments[0]]", number)
        assert kind == ("shot right" if right else "shot wrong") and label.endswith("right" if right else "wrong")
        if number > 30:
            break
    mark = "return getComputedStyle(document.querySelector(arguments[0]), '::after').content"
    assert "✕" in run(page, mark, ".shot.wrong") and "✕" not in run(page, mark, ".shot.right")


def test_pictures_are_there(page):
    """The first thumbnail of the page has the pixels of its tile."""
    drawn = page.execute_async_script("""
        const done = arguments[0], image = new Image();
        image.onload = () => {
          const canvas = document.createElement('canvas'); canvas.width = canvas.height = 16;
          const pen = canvas.getContext('2d'), at = tileOf(17);
          pen.drawImage(image, at.x, at.y, 16, 16, 0, 0, 16, 16);
          done(new Set(pen.getImageData(0, 0, 16, 16).data).size);
        };
        image.src = document.querySelector('[data-number="17"] .pic').style.backgroundImage.slice(5, -2);
    """)
    assert drawn > 20
    box = run(page, "return document.querySelector('[data-number=\"17\"] .pic').getBoundingClientRect()")
    assert (box["width"], box["height"]) == (44, 44)


def test_filters(page):
    assert enter(page, "pick-cluster", "2").startswith("1 cluster, 20 images shown of 300")
    assert cards(page) == [2]
    said = enter(page, "pick-right", "0")
    wrong = run(page, "const c = CLUSTERS[2]; return [...c.most, ...c.least].filter(n => !IMAGES.right[n]).length")
    assert f"{wrong} wrong image" in said
    assert number_of(page, ".card:not([hidden]) .shot.right:not([hidden])") == 0
    enter(page, "pick-right", "")
    assert enter(page, "pick-cluster", "-1").startswith("4 clusters, 80 images")


def test_search_among_all_names(page):
    page.execute_async_script(
        "const done = arguments[0], wait = () => everyLine ? done() : setTimeout(wait, 10); wait();"
    )
    assert enter(page, "search", "29").startswith("13 images found among all 300 names")
    assert run(page, "return document.getElementById('cards').hidden")
    assert enter(page, "search", "  ONERROR ").startswith("1 image found")
    assert run(page, "return document.querySelector('.results .name').textContent") == HOSTILE
    assert enter(page, "search", "img_7.p").startswith("1 image found")
    assert enter(page, "search", "lines \\udcff").startswith("1 image found")
    assert enter(page, "search", "nothing like it").startswith("0 images found")
    assert "The first 60 are shown" in enter(page, "search", "jpg")
    position = run(page, "return IMAGES.cluster[IMAGES.name.indexOf('299.jpg')]")
    enter(page, "pick-cluster", str((position + 1) % N_CLUSTERS))
    assert enter(page, "search", "299.jpg").startswith("0 images found")
    enter(page, "pick-cluster", "-1")
    assert enter(page, "search", "").startswith("4 clusters") and cards(page) == [0, 1, 2, 3]


def test_the_arrow_keys_go_along_a_row_and_enter_opens_an_image(page):
    Keys = keys()
    run(page, "document.querySelector('.shot').focus()")
    focused = "return Number(document.activeElement.dataset.number)"
    most = run(page, "return CLUSTERS[0].most")
    press(page, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert run(page, focused) == most[2]
    press(page, Keys.ARROW_LEFT, Keys.END)
    assert run(page, focused) == most[-1]
    press(page, Keys.ARROW_RIGHT)
    assert run(page, focused) == most[-1]
    press(page, Keys.TAB)  # the next row is the next stop
    assert run(page, focused) == run(page, "return CLUSTERS[0].least[0]")
    press(page, Keys.ENTER)
    assert run(page, "return document.getElementById('detail').open")
    assert text(page, "detail-name") == run(page, "return IMAGES.name[CLUSTERS[0].least[0]]")
    press(page, Keys.ESCAPE)
    assert not run(page, "return document.getElementById('detail').open")
    assert run(page, focused) == run(page, "return CLUSTERS[0].least[0]")


def test_a_hostile_name_stays_text_wherever_it_is_shown(page):
    run(page, "openDetail(IMAGES.name.indexOf(arguments[0]))", HOSTILE)
    assert text(page, "detail-name") == HOSTILE
    run(page, "document.getElementById('detail').close()")
    run(page, "choosePoint(POINTS.indexOf(IMAGES.name.indexOf(arguments[0])))", HOSTILE)
    assert HOSTILE in after_drawing(page, "document.getElementById('tip').textContent")
    assert HOSTILE in text(page, "map-live") and HOSTILE in text(page, "skipped")
    assert (
        run(page, "return document.querySelectorAll('b, img').length - document.querySelectorAll('.phase b').length")
        == 0
    )


# ---- map -------------------------------------------------------------------------------------------

ZOOM = "Number(document.getElementById('canvas').dataset.zoom)"


def test_zoom_by_buttons_keys_and_wheel(page):
    from selenium.webdriver import ActionChains

    Keys = keys()
    assert after_drawing(page, ZOOM) == 1
    run(page, "document.getElementById('zoom-in').click()")
    assert after_drawing(page, ZOOM) == 1.5
    run(page, "document.getElementById('canvas').focus()")
    press(page, "+", "+")
    assert after_drawing(page, ZOOM) == pytest.approx(3.375, abs=0.01)
    press(page, "-")
    assert after_drawing(page, ZOOM) == 2.25
    before = run(page, "return map.x")
    ActionChains(page).key_down(Keys.SHIFT).send_keys(Keys.ARROW_RIGHT).key_up(Keys.SHIFT).perform()
    assert run(page, "return map.x") > before
    press(page, "0")
    assert after_drawing(page, ZOOM) == 1 and run(page, "return map.x") == 0.5
    wheel = "CANVAS.dispatchEvent(new WheelEvent('wheel', {{deltaY: {}, cancelable: true, bubbles: true}}))"
    assert run(page, f"return {wheel.format(100)}")  # at the whole map the page scrolls on
    assert not run(page, f"return {wheel.format(-400)}")
    assert after_drawing(page, ZOOM) > 1.5
    run(page, "document.getElementById('zoom-all').click()")
    assert after_drawing(page, ZOOM) == 1


def test_what_lies_under_the_pointer_stays_there_when_zooming(page):
    x, y = run(page, "return toScreen(5)")
    run(page, "zoomBy(1.3, ...toScreen(5))")
    assert run(page, "return toScreen(5)") == pytest.approx([x, y], abs=1)


def test_two_fingers_zoom(page):
    run(
        page,
        """
        const box = CANVAS.getBoundingClientRect();
        const send = (type, pointerId, x) => CANVAS.dispatchEvent(new PointerEvent(type, {
          pointerId, pointerType: 'touch', clientX: box.x + x, clientY: box.y + 200, bubbles: true}));
        CANVAS.setPointerCapture = () => {};  // of fingers that are not there
        send('pointerdown', 1, 200); send('pointerdown', 2, 300); send('pointermove', 2, 500);
        send('pointerup', 1, 200); send('pointerup', 2, 500);
        """,
    )
    assert after_drawing(page, ZOOM) == pytest.approx(3, abs=0.1)


def test_dragging_moves_the_map(page):
    from selenium.webdriver import ActionChains

    run(page, "CANVAS.scrollIntoView({block: 'center', behavior: 'instant'}); zoomBy(4)")
    before = run(page, "return map.x * scale()")
    ActionChains(page).drag_and_drop_by_offset(page.find_element("id", "canvas"), 60, 0).perform()
    assert run(page, "return map.x * scale()") == pytest.approx(before - 60, abs=2)


def test_a_thumbnail_and_a_name_on_hover_and_on_keyboard_focus(page):
    from selenium.webdriver import ActionChains

    Keys = keys()
    run(page, "CANVAS.scrollIntoView({block: 'center', behavior: 'instant'})")
    x, y = run(
        page, "const [x, y] = toScreen(11); return [Math.round(x - map.width / 2), Math.round(y - map.height / 2)]"
    )
    ActionChains(page).move_to_element_with_offset(page.find_element("id", "canvas"), x, y).perform()
    point = after_drawing(page, "map.point")
    assert point >= 0
    name = run(page, "return IMAGES.name[POINTS[map.point]]")
    assert name in text(page, "tip") and number_of(page, "#tip .pic") == 1
    ActionChains(page).move_to_element(page.find_element("id", "map-title")).perform()
    assert after_drawing(page, "document.getElementById('tip').hidden")

    run(page, "CANVAS.focus()")
    press(page, Keys.ARROW_RIGHT)
    first = run(page, "return map.point")
    press(page, Keys.ARROW_RIGHT)
    second = run(page, "return map.point")
    assert first >= 0 and second not in (-1, first)
    a, b = run(page, "return [toScreen(arguments[0])[0], toScreen(arguments[1])[0]]", first, second)
    assert b > a
    assert text(page, "map-live").startswith(run(page, "return IMAGES.name[POINTS[map.point]]"))
    press(page, Keys.ENTER)
    assert run(page, "return document.getElementById('detail').open")
    press(page, Keys.ESCAPE, Keys.ESCAPE)
    assert run(page, "return map.point") == -1


def test_views_colours_and_highlights(page):
    views = run(page, "return [...document.querySelectorAll('[name=view]')].map(v => v.value)")
    assert views == ["target", "under", "over", "untrained"]
    assert "All 300 images" in text(page, "map-about")
    groups = "return [...document.querySelectorAll('#legend button .title')].map(b => b.textContent)"
    assert sorted(run(page, groups)) == ["0", "1", "2", "3"]
    run(page, "document.querySelector('[name=view][value=over]').click()")
    assert len(run(page, groups)) == 8 and "share features" in text(page, "map-about")
    run(page, "document.querySelector('[name=colour][value=class]').click()")
    assert run(page, groups) == ["class 0", "class 1", "class 2", "class 3"]
    places = "toScreen(3).join()"
    before = after_drawing(page, places)
    run(page, "document.querySelector('[name=view][value=untrained]').click()")
    assert after_drawing(page, places) != before and "before training" in text(page, "map-about")
    run(page, "document.querySelector('#legend button').click()")
    assert run(page, "return map.only") == 0
    assert run(page, "return document.querySelector('#legend button').getAttribute('aria-pressed')") == "true"
    assert run(page, "return IMAGES.class[POINTS[nearest(300, 300, 1e9)]]") == 0  # only those can be pointed at
    run(page, "document.querySelector('#legend button').click()")
    assert run(page, "return map.only") == -1


def test_thumbnails_take_the_place_of_points_where_there_is_room(page):
    assert after_drawing(page, "CANVAS.dataset.tiles") == "0"
    run(page, "goToPoint(4)")
    page.execute_async_script("const done = arguments[0]; setTimeout(done, 200)")
    assert 4 < int(after_drawing(page, "CANVAS.dataset.tiles")) < N
    nearest = run(
        page,
        "const at = [...tilesWithRoom()].map(toScreen);"
        "const gap = (a, b) => Math.max(Math.abs(a[0] - b[0]), Math.abs(a[1] - b[1]));"
        "return Math.min(...at.flatMap((a, i) => at.slice(i + 1).map(b => gap(a, b))))",
    )
    assert nearest >= run(page, "return TILE")  # none covers another
    assert after_drawing(page, "[...sheetImages.values()].every(i => i.naturalWidth > 0)")
    assert run(page, "return document.activeElement.id") == "canvas"


# ---- the rest --------------------------------------------------------------------------------------


def test_curves_tell_their_values(page):
    Keys = keys()
    assert number_of(page, ".chart svg[role=img]") == 3
    chart = "document.querySelector('.chart > svg')"
    assert "epoch 5: in all 0.800, instance 0.600, cluster 0.200" in run(page, f"return {chart}.ariaLabel")
    run(page, f"{chart}.focus()")
    press(page, Keys.ARROW_LEFT)
    assert run(page, "return document.querySelector('.chart .key').textContent").endswith("epoch 4")
    assert text(page, "charts-live").startswith("epoch 4: in all 1.000")
    press(page, Keys.HOME)
    assert "epoch 1: in all 4.000" in run(page, f"return {chart}.ariaLabel")
    gap = run(page, "return document.querySelectorAll('.chart')[1].querySelector('path.line').getAttribute('d')")
    assert gap.count("M") == 1 and gap.count("L") == 2  # epochs 3, 4 and 5


def test_a_command_can_be_copied(page):
    run(page, "document.querySelector('#pairs .copy').click()")
    said = page.execute_async_script(
        "const done = arguments[0]; setTimeout(() => done(document.querySelector('#pairs .copy').textContent), 100)"
    )
    assert said in ("Copied", "Selected")
    assert run(page, "return document.querySelector('#pairs code').textContent").startswith("semclust merge ")


def test_light_and_dark(page):
    ground = "return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]"
    ink = ground.replace("backgroundColor", "color")
    scheme(page, "light")
    assert run(page, ground) > 200 and run(page, ink) < 60
    scheme(page, "dark")
    assert run(page, ground) < 60 and run(page, ink) > 200
    scheme(page, "light")


@pytest.mark.parametrize("width", [320, 375, 768])
def test_no_sideways_scrolling(page, width):
    screen(page, width)
    run(page, "for (const d of document.querySelectorAll('details')) d.open = true")
    wide = run(
        page,
        "return [...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg, .unseen'))"
        ".filter(e => e.getBoundingClientRect().right > document.documentElement.clientWidth + 1)"
        ".map(e => e.outerHTML.slice(0, 90))",
    )
    assert wide == []
    assert run(page, "return document.documentElement.scrollWidth <= document.documentElement.clientWidth")


def test_a_run_without_labels_and_pictures(browser, tmp_path):
    from semclust.report.kept import FILE, read_kept, write_kept

    made = make_run(tmp_path, labels=False)
    kept = read_kept(made.path / FILE, N)
    kept.sheets, kept.pictured = None, kept.pictured[:0]
    write_kept(made.path / FILE, kept)
    show(browser, write_report(made.path))
    assert browser.get_log("browser") == []
    assert run(
        browser, "return [document.querySelectorAll('.shot .no-pic').length, document.querySelectorAll('.pic').length]"
    ) == [80, 0]
    assert (
        run(
            browser, "return document.querySelectorAll('#confusion, #pick-right, .right, .wrong, [name=colour]').length"
        )
        == 0
    )
    run(browser, "goToPoint(3)")
    assert after_drawing(browser, "CANVAS.dataset.tiles") == "0"


def test_many_images_stay_small_and_quick(browser, tmp_path):
    """A twentieth of benchmarks/report.py, with room for a busy machine."""
    made = make_run(tmp_path, 5_000, 100, size=24, channels=3)
    html = write_report(made.path)
    assert html.stat().st_size < 8e6
    show(browser, html)
    assert run(browser, "return performance.getEntriesByName('map-drawn')[0].startTime") < 6000
    assert "A random sample of 2,000 of the 5,000 images" in text(browser, "map-about")
    assert len(cards(browser)) == 100 and browser.get_log("browser") == []
    run(browser, "document.documentElement.style.scrollBehavior = 'auto'")
    run(browser, "document.querySelector('nav [href=\"#map\"]').click()")
    top = after_drawing(browser, "document.getElementById('map').getBoundingClientRect().top")
    assert 40 < top < 90  # just below the bar of links
