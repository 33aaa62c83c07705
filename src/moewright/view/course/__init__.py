"""The course: chapters whose every number and picture is computed by the rules themselves.

A chapter is a Markdown file with directives (`chapters/`). `chapter` reads it, `lesson` puts it to
a job, `figures` answers what its text asks for, `lesson_html` writes it for the studio and for the
documentation. See docs/adr/0026-chapters-are-computed.md.
"""
