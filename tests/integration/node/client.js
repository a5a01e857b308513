// node client.js SOCKET plain|identity|heartbeat|secured: a client of tasks.sock with zeromq.js.
// Submits a task and prints its result as JSON; secured prints the event of its failed handshake.
const { decode, encode } = require("@msgpack/msgpack")
const zmq = require("zeromq")

const [path, manner] = process.argv.slice(2)
const OPTIONS = {
  plain: {},
  identity: { routingId: "the same for all" },
  heartbeat: { heartbeatInterval: 20, heartbeatTimeout: 500 },
  secured: { plainUsername: "somebody", plainPassword: "secret" },
}

async function refused(dealer) {
  const heard = new Promise((resolve) => {
    dealer.events.on("handshake:error:protocol", () => resolve("handshake:error:protocol"))
    dealer.events.on("disconnect", () => resolve("disconnect"))
  })
  dealer.connect(`ipc://${path}`)
  return heard
}

async function served(dealer) {
  dealer.connect(`ipc://${path}`)
  const hear = async () => decode((await dealer.receive())[0])
  await dealer.send(encode(["hello", 1, "zeromq.js"]))
  const welcome = await hear()
  if (welcome[0] !== "welcome") throw new Error(`no welcome: ${welcome}`)
  if (manner === "heartbeat") await new Promise((done) => setTimeout(done, 1500))
  const id = `js-${process.pid}`
  await dealer.send(encode(["submit", 7, [[id, "jobs.echo", encode({ value: "from node" })]]]))
  const answers = {}
  while (!answers.results) {
    const [tag, ...rest] = await hear()
    answers[tag] = rest
  }
  const [outcome] = answers.results[0]
  return { epoch: welcome[2], accepted: answers.accepted, id: outcome[0] === id, state: outcome[1], result: decode(outcome[2]) }
}

const dealer = new zmq.Dealer({ linger: 0, ...OPTIONS[manner] })
;(manner === "secured" ? refused(dealer) : served(dealer)).then((found) => {
  console.log(JSON.stringify(found))
  process.exit(0)
}, (error) => {
  console.error(error)
  process.exit(1)
})
