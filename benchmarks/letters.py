"""Letters in the fonts of this machine, as a labelled set to compare methods on: semclust bench letters.npz.

python benchmarks/letters.py letters.npz --faces 250
        A to J in 250 faces drawn at random (all, without --faces), at most three of a family; needs fontconfig
python benchmarks/letters.py alphabet.npz --faces 200 --letters ABCDEFGHIJKLMNOPQRSTUVWXYZ
        other letters, each of them a class
python benchmarks/letters.py inks.npz --inks
        each image in an ink and on a paper of its own, in colours

Each letter is scaled to its box: 22 of 28 pixels on its longer side, in the middle. Faces without these letters, or of
which two are alike, are left out.
"""

import argparse
import subprocess
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

OF_A_FAMILY = 3
SIDE, LETTER = 28, 22


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--faces", type=int)
    parser.add_argument("--letters", default="ABCDEFGHIJ")
    parser.add_argument("--inks", action="store_true")
    asked = parser.parse_args()
    rng = np.random.default_rng(0)
    drawn = {}
    for family in families().values():
        for file in rng.permutation(family)[:OF_A_FAMILY]:
            letters = face(file, asked.letters)
            if len({letter.tobytes() for letter in letters}) == len(asked.letters):
                drawn[letters[0].tobytes()] = letters  # a face may go by two names
    faces = [list(drawn.values())[i] for i in rng.permutation(len(drawn))[: asked.faces]]
    order = rng.permutation(len(faces) * len(asked.letters))  # as they are, letters would come in turn
    images = np.array(faces).reshape(-1, SIDE, SIDE)[order]
    if asked.inks:
        images = in_inks(images, rng)
    np.savez(asked.out, images=images, labels=np.array(list(asked.letters) * len(faces))[order])
    print(f"{len(images):,} images: {asked.letters} in {len(faces)} of {len(drawn)} faces: {asked.out}")


def families() -> dict[str, list[str]]:
    """The files of each family of fonts that has Latin letters."""
    words = ["fc-list", ":lang=en", "--format", "%{family[0]}|%{file}\n"]
    listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    found: dict[str, list[str]] = {}
    for line in sorted(set(listed.splitlines())):
        family, _, file = line.rpartition("|")
        if file.lower().endswith((".ttf", ".otf")):
            found.setdefault(family, []).append(file)
    return found


def face(file: str, letters: str) -> list[np.ndarray]:
    """These letters of a font, or as many of them as it has."""
    font = ImageFont.truetype(file, 64)
    found = []
    for letter in letters:
        page = Image.new("L", (192, 192))
        ImageDraw.Draw(page).text((48, 48), letter, font=font, fill=255)
        if box := page.getbbox():
            found.append(np.asarray(scaled(page.crop(box))))
    return found


def scaled(letter: Image.Image) -> Image.Image:
    """In the middle of a square that its longer side fits into."""
    side = max(letter.size)
    square = Image.new("L", (side, side))
    square.paste(letter, ((side - letter.width) // 2, (side - letter.height) // 2))
    image = Image.new("L", (SIDE, SIDE))
    image.paste(square.resize((LETTER, LETTER), Image.Resampling.LANCZOS), ((SIDE - LETTER) // 2,) * 2)
    return image


def in_inks(images: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Letters (N x H x W) in any colour that is not light, on papers that are: N x H x W x 3."""
    share = images[..., None] / 255
    ink, paper = rng.integers(0, 192, (len(images), 1, 1, 3)), rng.integers(224, 256, (len(images), 1, 1, 3))
    return (share * ink + (1 - share) * paper).round().astype(np.uint8)


if __name__ == "__main__":
    main()
