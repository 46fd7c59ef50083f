"""python -m docs.figures: writes the figures of today's result files into the pages."""

from docs.figures import main

main()
