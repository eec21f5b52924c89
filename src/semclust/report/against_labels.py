"""The clusters beside the labels: figures, which images are right, and the confusion table.

Shapes: N images, G clusters that remain.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from semclust import metrics
from semclust.display import printable

LARGEST = 40  # clusters and classes in the confusion table, at most
SHADES = 9  # of a cell


@dataclass
class Comparison:
    figures: dict[str, float]  # ACC, NMI, ARI
    labels: np.ndarray  # N numbers of classes
    classes: list[str]  # their names
    table: np.ndarray  # G x classes: how many images
    stands_for: np.ndarray  # G: the class of each cluster by the best one-to-one match, -1 for none
    right: np.ndarray  # N: whether an image has the class that its cluster stands for


def compare(cluster: np.ndarray, n_clusters: int, labels: np.ndarray, classes: list[str]) -> Comparison:
    """``cluster``: N positions from 0 to G - 1, ``labels``: N numbers of ``classes``."""
    labels = labels.astype(np.int64)
    table = np.zeros((n_clusters, len(classes)), np.int64)
    np.add.at(table, (cluster, labels), 1)
    stands_for = np.full(n_clusters, -1)
    rows, columns = linear_sum_assignment(table, maximize=True)
    stands_for[rows] = columns
    names = [printable(name) for name in classes]
    figures = metrics.evaluate(cluster, labels)
    return Comparison(figures, labels, names, table, stands_for, stands_for[cluster] == labels)


def confusion(truth: Comparison, titles: list[str]) -> dict[str, Any]:
    """The table of clusters and classes, the cluster that stands for a class in that class's place."""
    table, stands_for = truth.table, truth.stands_for
    columns = np.sort(np.argsort(-table.sum(0), kind="stable")[:LARGEST])
    place = {int(column): i for i, column in enumerate(columns)}
    rows = sorted(range(min(LARGEST, len(titles))), key=lambda i: (place.get(int(stands_for[i]), LARGEST), i))

    def cell(row: int, column: int) -> dict[str, Any]:
        n = int(table[row, column])
        shade = math.ceil(SHADES * n / max(1, table[row].sum()))
        return {"n": n, "shade": shade, "match": bool(stands_for[row] == column)}

    return {
        "classes": [truth.classes[column] for column in columns],
        "rows": [{"title": titles[row], "cells": [cell(row, column) for column in columns]} for row in rows],
        "left_out": [max(0, len(titles) - LARGEST), max(0, len(truth.classes) - LARGEST)],
    }
