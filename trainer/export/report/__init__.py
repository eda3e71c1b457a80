"""report.html: a run folder, or a sweep's, as one page that needs nothing else: no network, no script."""
