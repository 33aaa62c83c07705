"""Reports of plans, runs, diagnoses and tunings: tables for a terminal, Markdown, HTML, SVG."""
