"""The words of the page and what they mean, for readers who are new to adversarial robustness."""

TERMS = {
    "clean accuracy": "share of the unchanged test images that are classified correctly; also SA",
    "robust accuracy": "share of the test images that are classified correctly under attack; also RA. An attack "
    "changes each image a little, so that the network errs",
    "average": "robust accuracy over all test images",
    "tail": "mean robust accuracy of the weakest 30 % of the classes, such as three of ten; which classes these are is "
    "found for each network and attack",
    "worst class": "the class with the lowest robust accuracy; an attacker can choose it",
    "ε": "size of the largest change that an attack may make, where pixels range from 0 to 1: of every pixel for ℓ∞, "
    "of the whole image for ℓ2",
    "PGD": "projected gradient descent, the usual attack: steps along the gradient of the loss",
    "strong attack": "short attacks on every other class from several starts; close to AutoAttack at about a tenth of "
    "its cost",
    "AutoAttack": "four attacks in a row, the number that papers report",
    "repaired": "the trained network with one number added to the logit of each class (doubly repair); no training",
    "seed": "a training run from other random numbers; ± is the standard deviation over seeds",
    "n": "number of test images",
}
