"""Our own script with the sequence of calls of the documents' one in mixed precision."""

import time

import torch
import torchvision

import torchacc

rows_per_batch, every = 8, 10
images = torch.rand(240, 3, 32, 32)
classes = torch.randint(0, 7, (240,))
data = torch.utils.data.TensorDataset(images, classes)
train_loader = torch.utils.data.DataLoader(
    data, batch_size=rows_per_batch, shuffle=True, num_workers=2
)

model = torchvision.models.resnet18()
model.fc = torch.nn.Linear(model.fc.in_features, 7)

model, train_loader = torchacc.accelerate(model, train_loader)
device = model.device
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.cuda.amp.GradScaler()

for epoch in range(1):
    model.train()
    begin = time.time()
    for step, (x, y) in enumerate(train_loader, 1):
        optimizer.zero_grad()
        with torch.cuda.amp.autocast():
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % every == 0:
            rate = rows_per_batch * every / (time.time() - begin)
            print(f"Epoch: {epoch}, Step: {step}, Loss: {loss:.4f}, Throughputs: {rate:.4f}")
            begin = time.time()
