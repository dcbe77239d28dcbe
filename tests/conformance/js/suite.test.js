// The official JavaScript SDK, unchanged, against a running server (E2B_* variables say which).
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { request } from 'node:http'
import { after, before, describe, it } from 'node:test'

import { CommandExitError, FileNotFoundError, NotFoundError, Sandbox, TimeoutError } from 'e2b'

const MINUTE = 60_000

function get(url, host) {
  return new Promise((resolve, reject) => {
    const call = request(url, { headers: { host } }, (answer) => {
      let body = ''
      answer.on('data', (chunk) => (body += chunk))
      answer.on('end', () => resolve({ status: answer.statusCode, body }))
    })
    call.on('error', reject)
    call.end()
  })
}

describe('official JavaScript SDK', { timeout: 20 * MINUTE }, () => {
  let sandbox
  before(async () => {
    sandbox = await Sandbox.create({ timeoutMs: 20 * MINUTE, metadata: { suite: 'js' }, envs: { FROM_CREATE: 'yes' } })
  })
  after(async () => {
    await sandbox?.kill()
  })

  it('runs commands in the foreground', async () => {
    const result = await sandbox.commands.run('echo out; echo err >&2; echo $FROM_CREATE $OWN; pwd', {
      envs: { OWN: 'own' },
      cwd: '/tmp',
    })
    assert.equal(result.stdout, 'out\nyes own\n/tmp\n')
    assert.equal(result.stderr, 'err\n')
    assert.equal(result.exitCode, 0)
  })

  it('raises exit codes', async () => {
    await assert.rejects(sandbox.commands.run('exit 9'), (error) => {
      assert.ok(error instanceof CommandExitError)
      assert.equal(error.exitCode, 9)
      return true
    })
  })

  it('runs as another user', async () => {
    assert.equal((await sandbox.commands.run('id -u', { user: 'root' })).stdout, '0\n')
  })

  it('kills at the timeout', async () => {
    await assert.rejects(sandbox.commands.run('sleep 100', { timeoutMs: 3000 }), (error) => error instanceof TimeoutError)
  })

  it('carries large output', async () => {
    const result = await sandbox.commands.run("head -c 2000000 /dev/zero | tr '\\0' y", { timeoutMs: 2 * MINUTE })
    assert.equal(result.stdout.length, 2_000_000)
  })

  it('feeds stdin, lists, connects and kills', async () => {
    const handle = await sandbox.commands.run('read line; echo got $line; sleep 1000', {
      background: true,
      stdin: true,
      timeoutMs: 0,
    })
    assert.ok((await sandbox.commands.list()).some((process) => process.pid === handle.pid))
    let seen = ''
    const again = await sandbox.commands.connect(handle.pid, {
      timeoutMs: 0,
      onStdout: (text) => {
        seen += text
      },
    })
    await sandbox.commands.sendStdin(handle.pid, 'text\n')
    while (!seen.includes('got text')) await sandbox.commands.run('true')
    assert.equal(await sandbox.commands.kill(handle.pid), true)
    await assert.rejects(again.wait())
    assert.equal(await sandbox.commands.kill(handle.pid), false)
  })

  it('opens a terminal', async () => {
    let output = ''
    const decoder = new TextDecoder()
    const terminal = await sandbox.pty.create({
      cols: 80,
      rows: 24,
      timeoutMs: 2 * MINUTE,
      onData: (data) => {
        output += decoder.decode(data, { stream: true })
      },
    })
    await sandbox.pty.resize(terminal.pid, { cols: 120, rows: 50 })
    await sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode('stty size; exit 3\n'))
    await assert.rejects(terminal.wait(), (error) => error.exitCode === 3)
    assert.match(output, /50 120/)
  })

  it('reads and writes files', async () => {
    const folder = `/home/user/${randomUUID()}`
    await sandbox.files.makeDir(folder)
    await sandbox.files.write(`${folder}/text`, 'héllo')
    assert.equal(await sandbox.files.read(`${folder}/text`), 'héllo')
    const bytes = new Uint8Array(300_000).map((_, index) => index % 256)
    await sandbox.files.write(`${folder}/bytes`, bytes.buffer)
    assert.deepEqual(await sandbox.files.read(`${folder}/bytes`, { format: 'bytes' }), bytes)
    const written = await sandbox.files.write([
      { path: `${folder}/one`, data: '1' },
      { path: `${folder}/deep/two`, data: '2' },
    ])
    assert.deepEqual(written.map((entry) => entry.path), [`${folder}/one`, `${folder}/deep/two`])
    const names = (await sandbox.files.list(folder)).map((entry) => entry.name)
    assert.deepEqual(names, ['bytes', 'deep', 'one', 'text'])
    const info = await sandbox.files.getInfo(`${folder}/text`)
    assert.equal(info.size, 6)
    assert.equal(info.owner, 'user')
    await sandbox.files.rename(`${folder}/text`, `${folder}/moved`)
    assert.equal(await sandbox.files.exists(`${folder}/text`), false)
    await sandbox.files.remove(`${folder}/moved`)
    assert.equal(await sandbox.files.exists(`${folder}/moved`), false)
    await assert.rejects(sandbox.files.read(`${folder}/moved`), (error) => {
      assert.ok(error instanceof FileNotFoundError || error instanceof NotFoundError)
      return true
    })
    assert.equal(await sandbox.files.makeDir(folder), false)
  })

  it('keeps metadata of files', async () => {
    const path = `/home/user/${randomUUID()}`
    await sandbox.files.write(path, 'x', { metadata: { Colour: 'blue' } })
    assert.deepEqual((await sandbox.files.getInfo(path)).metadata, { colour: 'blue' })
  })

  it('watches a directory', async () => {
    const folder = `/home/user/${randomUUID()}`
    await sandbox.files.makeDir(folder)
    const kinds = []
    let done
    const complete = new Promise((resolve) => (done = resolve))
    const watch = await sandbox.files.watchDir(
      folder,
      (event) => {
        if (event.name === 'file') kinds.push(event.type)
        if (kinds.length === 3) done()
      },
      { timeoutMs: 2 * MINUTE },
    )
    await sandbox.files.write(`${folder}/file`, 'x')
    await complete
    assert.deepEqual(kinds, ['create', 'chmod', 'write'])
    await watch.stop()
  })

  it('makes signed URLs', async () => {
    const path = `/home/user/${randomUUID()}`
    await sandbox.files.write(path, 'signed')
    const url = await sandbox.downloadUrl(path, { useSignatureExpiration: 60_000 })
    assert.equal(await (await fetch(url)).text(), 'signed')
    const target = await sandbox.uploadUrl(path, { useSignatureExpiration: 60_000 })
    const form = new FormData()
    form.append('file', new Blob(['uploaded']), path)
    assert.equal((await fetch(target, { method: 'POST', body: form })).status, 200)
    assert.equal(await sandbox.files.read(path), 'uploaded')
  })

  it('lists with metadata and shows info', async () => {
    const pages = Sandbox.list({ query: { metadata: { suite: 'js' } } })
    const items = await pages.nextItems()
    assert.deepEqual(items.map((item) => item.sandboxId), [sandbox.sandboxId])
    assert.equal(pages.hasNext, false)
    const info = await sandbox.getInfo()
    assert.equal(info.state, 'running')
    assert.deepEqual(info.metadata, { suite: 'js' })
  })

  it('connects and changes the timeout', async () => {
    const again = await Sandbox.connect(sandbox.sandboxId)
    assert.equal((await again.commands.run('echo again')).stdout, 'again\n')
    await sandbox.setTimeout(15 * MINUTE)
    const left = (await sandbox.getInfo()).endAt.getTime() - Date.now()
    assert.ok(left <= 15 * MINUTE)
  })

  it('reaches a server in the guest through get_host', async () => {
    const handle = await sandbox.commands.run('exec python3 -u -m http.server 8080 --bind 127.0.0.1', {
      background: true,
      cwd: '/etc',
      timeoutMs: 0,
    })
    const url = process.env.E2B_SANDBOX_URL
    const host = sandbox.getHost(8080)
    let answer
    do answer = await get(`${url}/hostname`, host)
    while (answer.status === 502)
    assert.equal(answer.status, 200)
    assert.match((await get(`${url}/`, sandbox.getHost(8089))).body, /port is not open/)
    await handle.kill()
  })

  it('reports metrics', async () => {
    let metrics = []
    while (metrics.length === 0) {
      metrics = await sandbox.getMetrics()
      await sandbox.commands.run('sleep 0.5')
    }
    assert.ok(metrics[0].memTotal > 0)
    assert.ok(metrics[0].cpuCount >= 1)
  })

  it('takes snapshots, creates from them and deletes them once', async () => {
    const path = `/home/user/${randomUUID()}`
    await sandbox.files.write(path, 'before')
    const process = await sandbox.commands.run('sleep 5000', { background: true, timeoutMs: 0 })
    const name = `js-${randomUUID().slice(0, 8)}`
    const first = await sandbox.createSnapshot({ name })
    assert.deepEqual(first.names, [`${name}:default`])
    await sandbox.files.write(path, 'after')
    const second = await sandbox.createSnapshot({ name })
    assert.equal(second.snapshotId, first.snapshotId)
    const listed = await Sandbox.listSnapshots({ sandboxId: sandbox.sandboxId }).nextItems()
    assert.equal(listed.length, 2)
    const older = listed.find((one) => one.snapshotId !== second.snapshotId)

    const copy = await Sandbox.create(older.snapshotId, { timeoutMs: 5 * MINUTE })
    try {
      assert.notEqual(copy.sandboxId, sandbox.sandboxId)
      assert.equal(await copy.files.read(path), 'before')
      assert.ok((await copy.commands.list()).some((one) => one.pid === process.pid))
    } finally {
      await copy.kill()
    }
    for (const { snapshotId } of [older, second]) {
      assert.equal(await Sandbox.deleteSnapshot(snapshotId), true)
      assert.equal(await Sandbox.deleteSnapshot(snapshotId), false)
    }
    assert.deepEqual(await Sandbox.listSnapshots({ sandboxId: sandbox.sandboxId }).nextItems(), [])
    await process.kill()
  })

  it('forks', async () => {
    const path = `/home/user/${randomUUID()}`
    await sandbox.files.write(path, 'of the source')
    const forks = await sandbox.fork({ count: 2, timeoutMs: 5 * MINUTE })
    try {
      assert.equal(forks.length, 2)
      const seen = new Set([sandbox.sandboxId])
      for (const fork of forks) {
        assert.ok(fork instanceof Sandbox, String(fork))
        seen.add(fork.sandboxId)
        assert.equal(await fork.files.read(path), 'of the source')
        assert.deepEqual((await fork.getInfo()).metadata, { suite: 'js' })
      }
      assert.equal(seen.size, 3)
    } finally {
      for (const fork of forks) if (fork instanceof Sandbox) await fork.kill()
    }
    assert.equal(await sandbox.files.read(path), 'of the source')
  })

  it('pauses at the end and is woken by traffic', async () => {
    const paused = await Sandbox.create({
      timeoutMs: 5 * MINUTE,
      lifecycle: { onTimeout: 'pause', autoResume: true },
    })
    try {
      await paused.files.write('/home/user/kept', 'before')
      await paused.setTimeout(1000)
      while ((await paused.getInfo()).state !== 'paused');
      assert.equal(await paused.files.read('/home/user/kept'), 'before')
      assert.equal(await paused.pause(), true)
      assert.equal(await paused.pause(), false)
      await assert.rejects(paused.createSnapshot())
      await assert.rejects(paused.fork())
      assert.equal(await (await Sandbox.connect(paused.sandboxId)).files.read('/home/user/kept'), 'before')
    } finally {
      assert.equal(await paused.kill(), true)
    }
  })

  it('notices a dead sandbox', async () => {
    const short = await Sandbox.create({ timeoutMs: 2 * MINUTE })
    assert.equal(await short.isRunning(), true)
    assert.equal(await short.kill(), true)
    assert.equal(await short.isRunning(), false)
    await assert.rejects(Sandbox.connect(short.sandboxId), (error) => error instanceof NotFoundError)
    assert.equal(await short.kill(), false)
  })
})
