"""What counting words knows of sentiment: TF-IDF and logistic regression, the floor for a trained encoder.

    QKV_DATA=FOLDER python bench/sentiment_baseline.py [--folds 5]

Needs scikit-learn. Words, or words and pairs of them, for English, runs of up to 2 or 3 characters for Chinese. The
n-grams and the strength of the regularisation are those that cross-validation on the training part finds best; the test
part is scored once, with them. Prints a JSON line per data set.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import sys
import time
from pathlib import Path

from qkv.evaluate import classification_scores

try:
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, StratifiedKFold
    from sklearn.pipeline import make_pipeline
except ModuleNotFoundError:
    sys.exit("this needs scikit-learn: pip install scikit-learn")

ANALYZERS = {"sentiment-zh": "char", "sentiment-en": "word"}
NGRAMS = {"char": [(1, 2), (1, 3)], "word": [(1, 1), (1, 2)]}
INVERSE_REGULARISATION = [1, 3, 10, 30, 100]


def read(path: Path) -> tuple[list[str], list[str]]:
    """Texts and labels of a TSV file whose first line names the columns."""
    header, *lines = gzip.decompress(path.read_bytes()).decode().rstrip("\n").split("\n")
    rows = [dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines]
    return [row["text"] for row in rows], [row["label"] for row in rows]


def baseline(folder: Path, folds: int) -> dict[str, object]:
    texts, labels = read(folder / "train.tsv.gz")
    test_texts, test_labels = read(folder / "test.tsv.gz")
    analyzer = ANALYZERS[folder.name]
    vectorizer = TfidfVectorizer(analyzer=analyzer, sublinear_tf=True, lowercase=True)
    if analyzer == "word":
        vectorizer.set_params(token_pattern=r"[\w']+")  # the default drops words of one letter
    search = GridSearchCV(
        make_pipeline(vectorizer, LogisticRegression(max_iter=1000)),
        {
            "tfidfvectorizer__ngram_range": NGRAMS[analyzer],
            "tfidfvectorizer__min_df": [1, 2],
            "logisticregression__C": INVERSE_REGULARISATION,
        },
        cv=StratifiedKFold(folds, shuffle=True, random_state=0),
    )
    started = time.perf_counter()
    search.fit(texts, labels)
    scores = classification_scores(search.predict(test_texts).tolist(), test_labels, ["0", "1"])
    return {
        "data": folder.name,
        "accuracy": round(scores.accuracy, 4),
        "f1": round(scores.f1, 4),
        "examples": scores.examples,
        "cross_validation_accuracy": round(search.best_score_, 4),
        "ngrams": search.best_params_["tfidfvectorizer__ngram_range"],
        "min_df": search.best_params_["tfidfvectorizer__min_df"],
        "C": search.best_params_["logisticregression__C"],
        "features": len(search.best_estimator_[0].vocabulary_),
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int, default=5, help="of the cross-validation (default: 5)")
    options = parser.parse_args()
    if "QKV_DATA" not in os.environ:
        sys.exit("QKV_DATA must name the folder that holds sentiment-zh and sentiment-en")
    for name in ANALYZERS:
        print(json.dumps(baseline(Path(os.environ["QKV_DATA"]) / name, options.folds)), flush=True)


if __name__ == "__main__":
    main()
