"""A ResNet with BatchNorm on augmented images that several processes load."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset

import shoal

NUM_IMAGES, SIZE, CLASSES, EPOCHS, BATCH, RATE = 640, 12, 4, 6, 32, 0.05


class Augmented(Dataset):
    """The images of all epochs in sequence; each epoch crops and flips an image differently."""

    def __init__(self):
        generator = torch.Generator().manual_seed(1)
        self.labels = torch.randint(CLASSES, (NUM_IMAGES,), generator=generator)
        noise = torch.randn(NUM_IMAGES, 3, SIZE, SIZE, generator=generator)
        self.images = noise + self.labels.view(-1, 1, 1, 1) / 2

    def __len__(self):
        return EPOCHS * NUM_IMAGES

    def __getitem__(self, index):
        drawn = torch.Generator().manual_seed(index)
        top, left = torch.randint(4, (2,), generator=drawn).tolist()
        image = nn.functional.pad(self.images[index % NUM_IMAGES], (2, 2, 2, 2))
        image = image[:, top : top + SIZE, left : left + SIZE]
        flips = bool(torch.randint(2, (), generator=drawn))
        return (image.flip(-1) if flips else image), self.labels[index % NUM_IMAGES]


class Block(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(outer)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(outer)
        self.short = nn.Conv2d(inner, outer, 1, stride, bias=False)

    def forward(self, x):
        y = self.norm_2(self.second(relu(self.norm_1(self.first(x)))))
        return relu(y + self.short(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(3, 8, 1), Block(8, 16, 2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, images):
        return self.head(self.blocks(images).mean((2, 3)))


def main():
    torch.manual_seed(0)
    model, data = ResNet(), Augmented()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    schedule = OneCycleLR(optimizer, RATE, total_steps=len(data) // BATCH)
    loader = DataLoader(data, BATCH, num_workers=1, persistent_workers=True)
    model.train()
    with shoal.join() as session:
        session.register("schedule", schedule)
        model, optimizer = session.distribute(model, optimizer, sync_batchnorm=True)
        for batch in session.batches(loader):
            with session.step():
                loss = cross_entropy(model(batch.inputs), batch.targets)
                session.backward(loss)
                schedule.step()
        if session.is_first:
            torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
