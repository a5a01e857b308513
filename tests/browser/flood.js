// Replace the event stream by a fleet of 200 workers that changes with every event.
window.sent = 0;
window.EventSource = class {
  static OPEN = 1; static CLOSED = 2;
  constructor() {
    this.readyState = 1;
    const chance = (most) => Math.floor(Math.random() * most);
    const states = ['RUNNING', 'BUSY', 'BUSY', 'BUSY', 'BACKOFF', 'STARTING'];
    const tell = () => {
      const at = Date.now() / 1000, number = ++window.sent;
      const workers = {};
      for (let index = 0; index < 200; index += 1) {
        const state = states[chance(states.length)];
        workers[`jobs/${index}`] = { state, pid: 4000 + index, memory: chance(9e8), up_at: at - chance(1e6),
          ...(state === 'BUSY' ? { task: 't' + chance(1e9), method: 'x'.repeat(chance(40)), task_at: at - chance(1e4) } : {}),
          restarts: chance(1000), reason: state === 'BACKOFF' ? 'exited with code 1 '.repeat(9) : '' };
      }
      const row = (index) => ({ id: 'a'.repeat(20) + (number * 100 + index), name: 'jobs.' + 'n'.repeat(chance(60)),
        state: ['succeeded', 'failed'][chance(2)], attempt: chance(9), finished_at: at - chance(9e4), run_seconds: chance(900) / 7,
        target: 'shop'.repeat(chance(9)) + '.example', error: 'E'.repeat(chance(290)) });
      const queued = { critical: 50, high: 250, normal: 2500, low: 7000 };
      const pools = { jobs: { state: 'RUNNING', size: 200, running: chance(200), busy: chance(200), queued, waiting: chance(9999),
        submitted: 1, succeeded: chance(1e8), failed: chance(1e5), cancelled: 0, expired: 0, restarts: chance(1e4), reason: 'w'.repeat(chance(300)), halt: '' } };
      const point = [at, chance(9000), chance(90), 50, 250, 2500, 7000, 1, 2, 3, 0.5];
      const news = { number, at, fields: ['at','succeeded','failed','critical','high','normal','low','waiting','busy','running','memory'],
        actions: false, daemon: { version: '1', pid: 1, state: 'running', started_at: at - 1e5 }, workers, pools,
        health: { level: ['ok', 'warning', 'bad'][chance(3)], text: 'Action needed', reasons: [...Array(chance(5))].map(() => ({ level: 'bad', text: 'because '.repeat(chance(60)) })) },
        tasks: { rows: [...Array(100)].map((_, index) => row(index)), more: true }, dead: { rows: [], more: false },
        breakers: [...Array(50)].map((_, index) => ({ target: `site${index}.example`, state: 'open', failures: chance(99), waiting: chance(9999), open_until: at + chance(9999) })),
        schedules: [], events: [] };
      if (number === 1) news.points = [...Array(600)].map((_, index) => [at - 600 + index, ...point.slice(1)]);
      else news.point = point;
      this.onmessage({ data: JSON.stringify(news) });
    };
    setInterval(tell, 200);
  }
  close() {}
};
