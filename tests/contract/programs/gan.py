"""Two models in turn, gradient penalty, two schedules, a discriminator that makes more steps than the generator."""

import torch
from common import FEATURES, Rows, finish
from torch import nn

torch.manual_seed(1)
data = Rows(48)
noise = torch.Generator().manual_seed(4)
generator = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Linear(24, FEATURES))
critic = nn.Sequential(nn.Linear(FEATURES, 24), nn.LeakyReLU(), nn.Dropout(0.1), nn.Linear(24, 1))
to_generate = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
to_criticise = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.97) for o in (to_generate, to_criticise)]
criticised = generated = 0
for epoch in range(2):
    order = torch.randperm(48)
    for at in range(0, 48, 8):
        real = data.x[order[at : at + 8]]
        for _ in range(2):
            fake = generator(torch.randn(8, 6, generator=noise)).detach()
            between = (real + torch.rand(8, 1) * (fake - real)).requires_grad_()
            slopes = torch.autograd.grad(critic(between).sum(), between, create_graph=True)[0]
            penalty = ((slopes.norm(dim=1) - 1) ** 2).mean()
            loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
            to_criticise.zero_grad()
            loss.backward()
            to_criticise.step()
            criticised += 1
        to_generate.zero_grad()
        wanted = -critic(generator(torch.randn(8, 6, generator=noise))).mean()
        wanted.backward()
        to_generate.step()
        generated += 1
        print(f"{criticised} {loss.item():.6f} {wanted.item():.6f}", flush=True)
    for schedule in schedules:
        schedule.step()
finish(nn.ModuleList([generator, critic]), to_generate, criticised, generated)
finish(critic, to_criticise, criticised, loss.item())
