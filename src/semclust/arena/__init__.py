"""semclust beside other methods, and without its own parts, on data whose labels are known: ``semclust bench NAME``.

methods.py      what is compared: every row of the tables
runs.py         one run of a method, and a folder of finished runs
baselines.py    k-means on pixels; DeepCluster's alternation
tables.py       means and spreads, as JSON, Markdown and on the terminal
bars.py         a bar chart
label_free.py   what choosing by the label-free score costs
machine.py      what it was measured on
"""
