"""One module a command: `run(words)` takes the words after the command and returns the exit code."""
