"""From pictures to answers: decoding, embedding by a backbone, FewShotClassifier, the local page."""
