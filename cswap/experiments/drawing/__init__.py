"""Drawing: labels of plots, and the HTML page that pictures are put on."""
