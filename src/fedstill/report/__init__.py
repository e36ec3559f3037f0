"""Results for people: tables (`text`), figures (`figures`, `timeline`), and the record `summary.json` (`summary`)."""
