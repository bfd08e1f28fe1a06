#!/usr/bin/env python3
"""Opens a page of tessera-report in headless Chromium, on a wide and a narrow window, light and dark.

    report_page.py REPORT.html [--shots DIR] [--chromium PATH]

It fails on an error or a warning of the page, a request for anything but the page, a page that is wider than its
window, text below 10 pixels, and a chart that says nothing under a pointer or for a key.
pip install playwright; the browser is Debian's package chromium.
"""
import argparse
import os
import sys

from playwright.sync_api import sync_playwright

TOO_SMALL = """() => [...document.querySelectorAll("main *")].filter(e => e.checkVisibility() &&
    [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim()) && e.tagName !== "SCRIPT" &&
    parseFloat(getComputedStyle(e).fontSize) < 10).map(e => e.outerHTML.slice(0, 80))"""
OUTSIDE = """() => [...document.querySelectorAll("main *")].filter(e => e.checkVisibility() && !e.closest(".scroll, pre, svg") &&
    e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""


def check(page, path, shot):
    problems = []
    page.on("console", lambda m: problems.append(f"{m.type}: {m.text}") if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: problems.append(f"error: {e}"))
    address = "file://" + os.path.abspath(path)
    page.on("request", lambda r: problems.append(f"request: {r.url[:100]}") if r.url not in (address, "data:,") else None)
    page.goto(address)
    problems += [f"smaller than 10 pixels: {e}" for e in page.evaluate(TOO_SMALL)]
    problems += [f"beyond the window: {e}" for e in page.evaluate(OUTSIDE)]
    page.screenshot(path=shot + ".png", full_page=True)
    canvases = page.locator(".canvas")
    for i in range(canvases.count()):
        canvas = canvases.nth(i)
        for way in ("pointer", "key"):
            is_heat = canvas.locator("xpath=..").get_attribute("class").find("heat") >= 0
            if way == "key" and is_heat:
                continue
            canvas.scroll_into_view_if_needed()
            if way == "pointer":
                canvas.hover(position={"x": canvas.bounding_box()["width"] * 0.6, "y": 40})
            else:
                page.mouse.move(0, 0)
                canvas.focus()
                page.keyboard.press("ArrowRight")
            tip = canvas.locator(".tip")
            title = canvas.get_attribute("aria-label") or "a map"
            if tip.count() != 1 or not tip.inner_text().strip():
                problems.append(f"{title}: nothing is said for a {way}")
                continue
            problems += [f"beyond the window: {e}" for e in page.evaluate(OUTSIDE)]
            if i == 0 and way == "pointer":
                page.screenshot(path=shot + "-hover.png")
    return canvases.count(), list(dict.fromkeys(problems))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report")
    parser.add_argument("--shots", default=".")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    options = parser.parse_args()
    failed = False
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium, args=["--no-sandbox"])
        for width, height in ((1440, 900), (390, 844)):
            for scheme in ("light", "dark"):
                context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
                name = f"{os.path.splitext(os.path.basename(options.report))[0]}-{width}-{scheme}"
                count, problems = check(context.new_page(), options.report, os.path.join(options.shots, name))
                print(f"{name}: {count} charts, {len(problems)} problems")
                for problem in problems:
                    print("  " + problem)
                failed = failed or count == 0 or bool(problems)
                context.close()
        browser.close()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
