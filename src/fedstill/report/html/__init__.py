"""report.html: one page that holds all of a run, a comparison or a sweep, and needs nothing else to be opened.

    read.py       what the folders hold, without data and without training
    markup.py     elements and attributes, escaped          svg.py      scales, axes, curves in SVG
    answer.py     the sentences at the top                  tables.py   tables, with LaTeX and Markdown (results.py: which)
    attacked.py   clean, attacked and defended
    style.py      which methods are in colour
    curves.py  clients.py  verdicts.py  holdings.py  grid.py  gantt.py    one figure each
    page.py       the sections, put together                page.css  figure.css  page.js

No template engine: a function takes numbers and returns markup.
"""
