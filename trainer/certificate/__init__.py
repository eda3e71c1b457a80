"""Whether a model can be trained here, proven on a tiny twin of it: `certify` runs the checks, `settle` the quick part
that a run makes at its start, `probe` what every run makes on the model itself."""
