"""Learn to remember: a recurrent policy and value function, rollouts step by step, PPO over whole rollouts."""

import argparse

import torch
from torch import nn


class Cue:
    """Many copies of a game: a cue is shown once, and has to be repeated whenever a light is on."""

    def __init__(self, copies: int) -> None:
        self.copies = copies

    def reset(self) -> torch.Tensor:
        self.cue = torch.randint(2, (self.copies,))
        self.light = torch.zeros(self.copies)
        return torch.stack([self.cue * 2.0 - 1, self.light], -1)

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        reward = self.light * ((action == self.cue) * 2.0 - 1)
        self.light = (torch.rand(self.copies) < 0.2).float()
        return torch.stack([torch.zeros(self.copies), self.light], -1), reward


class Policy(nn.Module):
    def __init__(self, hidden: int = 80) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, hidden)
        self.actor, self.critic = nn.Linear(hidden, 2), nn.Linear(hidden, 1)

    def forward(self, seen, state=None):
        hidden, state = self.lstm(seen, state)
        return torch.distributions.Categorical(logits=self.actor(hidden)), self.critic(hidden).squeeze(-1), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--copies", type=int, default=64)
    args = parser.parse_args()
    torch.manual_seed(0)
    game, policy = Cue(args.copies), Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for iteration in range(args.iterations):
        seen, actions, logs, rewards, values, state, now = [], [], [], [], [], None, game.reset()
        with torch.no_grad():
            for _ in range(args.steps):
                choice, value, state = policy(now[None], state)
                action = choice.sample()
                seen.append(now), actions.append(action[0]), logs.append(choice.log_prob(action)[0])
                values.append(value[0])
                now, reward = game.step(action[0])
                rewards.append(reward)
        returns, total = [], torch.zeros(args.copies)
        for reward in reversed(rewards):
            total = reward + 0.9 * total
            returns.insert(0, total)
        inputs, chosen, before, goal = (torch.stack(x) for x in (seen, actions, logs, returns))
        advantage = goal - torch.stack(values)
        advantage = (advantage - advantage.mean()) / advantage.std()
        for _ in range(2):
            choice, value, _ = policy(inputs)
            ratio = (choice.log_prob(chosen) - before).exp()
            surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = 0.5 * (value - goal).square().mean() - surrogate - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            print(f"iteration {iteration} reward {sum(rewards).mean().item():.4f} loss {loss.item():.9g}", flush=True)


if __name__ == "__main__":
    main()
