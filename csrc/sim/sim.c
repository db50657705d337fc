/* SPDX-License-Identifier: Apache-2.0 */
/* See isw_sim.h. For tests: allocates freely. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "sim/sim.h"

static const struct iswi_backup_ops sim_backup_ops;

struct iswi_sim *iswi_sim_of(const struct isw_engine *e)
{
	return e->backup->ops == &sim_backup_ops ? e->backup->ctx : NULL;
}

/* ------------------------------------------------------------------------ donors */

/* Where a request's bytes lie now; NULL: its slot is empty. None reaches over a slab's border. */
static unsigned char *place(const struct iswi_sim_donor *donor, uint64_t offset)
{
	uint64_t slab_bytes = donor->engine->config.slab_bytes;
	unsigned char *slot;

	if (!donor->slots)
		return donor->memory + offset;
	slot = donor->slots[offset / slab_bytes];
	return slot ? slot + offset % slab_bytes : NULL;
}

static void apply(struct iswi_sim_donor *donor, struct iswi_sim_transfer *t)
{
	struct iswi_xfer *x = t->xfer;
	unsigned char *bytes = place(donor, x->offset);

	if (t->applied)
		return;
	t->applied = true;
	if (!bytes)
		t->error = -EIO;
	else if (x->kind == ISWI_XFER_WRITE)
		memcpy(bytes, x->buf, x->length);
	else if (x->buf)
		memcpy(x->buf, bytes, x->length);
}

static void sim_submit(struct iswi_queue *queue, struct iswi_xfer *first)
{
	struct iswi_sim_donor *donor = ((struct iswi_sim_queue *)queue)->donor;

	while (first) {
		struct iswi_xfer *x = first;

		first = x->next;
		x->submitted_ns = donor->engine->clock->now_ns(donor->engine->clock->ctx);
		if (x->offset + x->length > donor->bytes)
			x->done(x, -EINVAL);
		else if (donor->down || donor->pending_count == ISWI_SIM_TRANSFERS)
			x->done(x, -ESHUTDOWN);
		else
			donor->pending[donor->pending_count++] =
				(struct iswi_sim_transfer){x, false, 0};
	}
}

static void add_late(struct iswi_sim_donor *donor, uint64_t offset, uint32_t length,
		     const void *bytes)
{
	struct iswi_sim_late *late;

	if (donor->fenced || donor->late_count == ISWI_SIM_TRANSFERS)
		return;
	late = &donor->late[donor->late_count++];
	*late = (struct iswi_sim_late){offset, length, malloc(length)};
	memcpy(late->bytes, bytes, length);
}

static void keep_late(struct iswi_sim_donor *donor, const struct iswi_sim_transfer *t)
{
	if (!t->applied && t->xfer->kind == ISWI_XFER_WRITE)
		add_late(donor, t->xfer->offset, t->xfer->length, t->xfer->buf);
}

static void break_connections(struct iswi_sim_donor *donor, int error)
{
	struct iswi_queue_events *events = &donor->engine->remotes[donor->remote].events;

	if (donor->down)
		return;
	donor->down = true;
	events->down(events->ctx, error);
	while (donor->pending_count) {
		struct iswi_sim_transfer t = donor->pending[--donor->pending_count];

		keep_late(donor, &t);
		t.xfer->done(t.xfer, error);
	}
}

static void sim_shutdown(struct iswi_queue *queue)
{
	break_connections(((struct iswi_sim_queue *)queue)->donor, -ESHUTDOWN);
}

static void sim_destroy_queue(struct iswi_queue *queue)
{
	sim_shutdown(queue);
	free(queue);
}

static const struct iswi_transport_ops sim_ops = {
	.name = "sim",
	.submit = sim_submit,
	.shutdown = sim_shutdown,
	.destroy = sim_destroy_queue,
};

static int make_queues(struct iswi_sim_donor *donor, uint32_t count)
{
	struct iswi_queue *queues[ISWI_REMOTE_QUEUES_MAX];

	if (!count || count > ISWI_REMOTE_QUEUES_MAX)
		return -EINVAL;
	for (uint32_t i = 0; i < count; i++) {
		struct iswi_sim_queue *queue = calloc(1, sizeof(*queue));

		queue->base.ops = &sim_ops;
		queue->donor = donor;
		queues[i] = &queue->base;
	}
	donor->down = donor->fenced = false;
	donor->queues = count;
	iswi_remote_set(donor->engine, donor->remote, queues, count, ISWI_REMOTE_UP);
	return 0;
}

static void forget_late(struct iswi_sim_donor *donor)
{
	while (donor->late_count)
		free(donor->late[--donor->late_count].bytes);
}

static void free_donor(struct iswi_sim_donor *donor)
{
	if (!donor)
		return;
	forget_late(donor);
	free(donor->slots);
	free(donor->memory);
	free(donor);
}

int isw_sim_remote(isw_engine *e, uint32_t queues, uint32_t slots, uint32_t *remote_out)
{
	struct iswi_sim *sim = iswi_sim_of(e);
	struct iswi_sim_donor *donor;
	uint32_t remote = ISW_NO_REMOTE;
	int code = sim ? iswi_remote_reserve(e, &remote) : -EINVAL;

	if (code)
		return code;
	if (remote >= ISWI_SIM_REMOTES)
		return -ENOSPC;
	donor = calloc(1, sizeof(*donor));
	donor->engine = e;
	donor->remote = remote;
	donor->bytes = slots * e->config.slab_bytes;
	donor->memory = calloc(1, donor->bytes);
	free_donor(sim->donors[remote]); /* a number used again, after isw_remote_destroy */
	sim->donors[remote] = donor;
	*remote_out = remote;
	return make_queues(donor, queues);
}

static struct iswi_sim_donor *find_donor(isw_engine *e, uint32_t remote)
{
	const struct iswi_sim *sim = iswi_sim_of(e);

	return sim && remote < ISWI_SIM_REMOTES ? sim->donors[remote] : NULL;
}

int isw_sim_slot(isw_engine *e, uint32_t remote, uint32_t slot, void *memory)
{
	struct iswi_sim_donor *donor = find_donor(e, remote);
	uint64_t slots;

	if (!donor)
		return -EINVAL;
	slots = donor->bytes / e->config.slab_bytes;
	if (slot >= slots)
		return -EINVAL;
	if (!donor->slots)
		donor->slots = calloc(slots, sizeof(*donor->slots));
	donor->slots[slot] = memory;
	return 0;
}

int isw_sim_fence(isw_engine *e, uint32_t remote)
{
	struct iswi_sim_donor *donor = find_donor(e, remote);

	if (!donor)
		return -EINVAL;
	forget_late(donor);
	donor->fenced = true;
	return 0;
}

int isw_sim_pending(isw_engine *e, uint32_t remote)
{
	struct iswi_sim_donor *donor = find_donor(e, remote);

	return donor ? (int)donor->pending_count : -EINVAL;
}

int isw_sim_remote_reconnect(isw_engine *e, uint32_t remote)
{
	struct iswi_sim_donor *donor = find_donor(e, remote);
	uint32_t queues;
	int code;

	if (!donor)
		return -EINVAL;
	queues = donor->queues;
	/* The front end's thread would do so while retire waits. */
	iswi_engine_unplug(e, &iswi_sim_of(e)->plug);
	code = iswi_remote_reserve(e, &remote);
	if (!code)
		code = iswi_remote_retire(e, remote);
	if (code)
		return code;
	if (!donor->slots)
		forget_late(donor);
	return make_queues(donor, queues);
}

/* ---------------------------------------------------------------------- requests */

static void sim_done(struct iswi_req *req, int error)
{
	struct iswi_sim_req *done = ISWI_CONTAINER(req, struct iswi_sim_req, req);

	atomic_store(&req->error, error);
	done->next = NULL;
	*done->sim->done_tail = done;
	done->sim->done_tail = &done->next;
}

int isw_sim_submit(isw_engine *e, uint32_t op, uint64_t offset, uint64_t length, const void *data,
		   uint64_t *id_out)
{
	static const enum iswi_req_op ops[] = {
		[ISW_SIM_READ] = ISWI_READ,   [ISW_SIM_WRITE] = ISWI_WRITE,
		[ISW_SIM_TRIM] = ISWI_TRIM,   [ISW_SIM_ZERO] = ISWI_ZERO,
		[ISW_SIM_FLUSH] = ISWI_FLUSH,
	};
	struct iswi_sim *sim = iswi_sim_of(e);
	struct iswi_sim_req *sim_req;
	uint32_t kind = op & 0xff;

	if (!sim || kind < ISW_SIM_READ || kind > ISW_SIM_FLUSH)
		return -EINVAL;
	sim_req = calloc(1, sizeof(*sim_req));
	sim_req->sim = sim;
	sim_req->id = *id_out = ++sim->ids;
	sim_req->op = op;
	sim_req->req.op = ops[kind];
	sim_req->req.flags = op & ISW_SIM_FUA ? ISWI_REQ_FUA : 0;
	sim_req->req.offset = offset;
	sim_req->req.length = length;
	sim_req->req.done = sim_done;
	sim_req->open_next = sim->open;
	sim_req->open_link = &sim->open;
	if (sim->open)
		sim->open->open_link = &sim_req->open_next;
	sim->open = sim_req;
	if (kind == ISW_SIM_READ || kind == ISW_SIM_WRITE) {
		sim_req->req.data = aligned_alloc(ISW_PAGE_BYTES, length ? length : ISW_PAGE_BYTES);
		if (kind == ISW_SIM_WRITE)
			memcpy(sim_req->req.data, data, length);
		else
			memset(sim_req->req.data, 0xa5, length); /* not zeros by chance */
	}
	if (op & ISW_SIM_PLUG)
		iswi_engine_submit_plugged(e, &sim_req->req, &sim->plug);
	else
		iswi_engine_submit(e, &sim_req->req);
	return 0;
}

static void free_request(struct iswi_sim_req *sim_req)
{
	*sim_req->open_link = sim_req->open_next;
	if (sim_req->open_next)
		sim_req->open_next->open_link = sim_req->open_link;
	free(sim_req->req.data);
	free(sim_req);
}

int isw_sim_reap(isw_engine *e, struct isw_sim_request *done_out, void *data, uint64_t data_bytes)
{
	struct iswi_sim *sim = iswi_sim_of(e);
	struct iswi_sim_req *done = sim->done;

	if (!done)
		return 0;
	sim->done = done->next;
	if (!sim->done)
		sim->done_tail = &sim->done;
	*done_out = (struct isw_sim_request){
		.id = done->id,
		.offset = done->req.offset,
		.length = done->req.length,
		.error = atomic_load(&done->req.error),
		.op = done->op,
	};
	if (done->req.op == ISWI_READ && data)
		memcpy(data, done->req.data, ISWI_MIN(data_bytes, done->req.length));
	free_request(done);
	return 1;
}

/* ------------------------------------------------------------------------- steps */

static int step_transfer(struct iswi_sim_donor *donor, uint32_t step, uint32_t n)
{
	struct iswi_sim_transfer t;
	struct iswi_xfer *x;

	if (!donor->pending_count)
		return 0;
	n %= donor->pending_count;
	x = donor->pending[n].xfer;
	/* From a closed connection only answers that were on their way arrive. */
	if (donor->fenced && !donor->pending[n].applied && step != ISW_STEP_REMOTE_SLOW)
		return 0;
	if (step == ISW_STEP_REMOTE_APPLY) {
		if (donor->pending[n].applied)
			return 0;
		apply(donor, &donor->pending[n]);
		return 1;
	}
	if (step == ISW_STEP_REMOTE_SLOW) {
		if (x->kind != ISWI_XFER_READ || !x->slow_us)
			return 0;
		x->slow_us = 0;
		x->slow(x, donor->pending[n].applied ? x->length : 0);
		return 1;
	}
	if (step == ISW_STEP_REMOTE_TEAR) {
		if (x->kind != ISWI_XFER_WRITE || donor->pending[n].applied)
			return 0;
		if (place(donor, x->offset))
			memcpy(place(donor, x->offset), x->buf, x->length / 2 + 512);
		break_connections(donor, -ECONNRESET);
		return 1;
	}
	if (step == ISW_STEP_REMOTE_CORRUPT && x->kind != ISWI_XFER_READ)
		return 0;
	if (step != ISW_STEP_REMOTE_FAIL)
		apply(donor, &donor->pending[n]);
	t = donor->pending[n];
	memmove(&donor->pending[n], &donor->pending[n + 1],
		(donor->pending_count - n - 1) * sizeof(t));
	donor->pending_count--;
	if (step == ISW_STEP_REMOTE_CORRUPT && x->buf)
		((unsigned char *)x->buf)[x->length / 2] ^= 0x40;
	x->done(x, step == ISW_STEP_REMOTE_FAIL ? -EIO : t.error);
	return 1;
}

static int step_remote(struct isw_engine *e, uint32_t step, uint32_t r, uint32_t n)
{
	struct iswi_sim_donor *donor = find_donor(e, r);
	struct iswi_sim_late *late;

	if (!donor)
		return -EINVAL;
	switch (step) {
	case ISW_STEP_REMOTE_DOWN:
		if (donor->down)
			return 0;
		break_connections(donor, -ECONNRESET);
		return 1;
	case ISW_STEP_REMOTE_LATE:
		if (!donor->late_count)
			return 0;
		late = &donor->late[n % donor->late_count];
		if (place(donor, late->offset)) /* else the donor refuses it */
			memcpy(place(donor, late->offset), late->bytes, late->length);
		free(late->bytes);
		*late = donor->late[--donor->late_count];
		return 1;
	case ISW_STEP_REMOTE_WIPE:
		if (donor->slots || (n + 1ull) * e->config.slab_bytes > donor->bytes)
			return -EINVAL;
		memset(donor->memory + n * e->config.slab_bytes, 0, e->config.slab_bytes);
		return 1;
	default:
		return step_transfer(donor, step, n);
	}
}

static void write_disk(struct iswi_sim *sim, const struct iswi_job *job, uint32_t pages)
{
	for (uint32_t i = 0; i < pages; i++)
		memcpy(sim->disk + (job->page + i) * ISW_PAGE_BYTES,
		       sim->engine->staging + (uint64_t)job->slots[i] * ISW_PAGE_BYTES,
		       ISW_PAGE_BYTES);
}

static int step_backup_end(struct iswi_sim *sim, uint32_t n, int error)
{
	struct iswi_job job;
	void *own = NULL;

	if (!sim->jobs_count)
		return 0;
	n %= sim->jobs_count;
	job = sim->jobs[n];
	sim->jobs[n] = sim->jobs[--sim->jobs_count];
	if (job.kind == ISWI_JOB_WRITE) {
		write_disk(sim, &job, error ? (job.pages + 1) / 2 : job.pages);
		if (error) /* ... and the last of them is torn */
			memset(sim->disk + job.page * ISW_PAGE_BYTES, 0xee, ISW_PAGE_BYTES / 2);
	}
	if (job.kind == ISWI_JOB_READ && !job.op->xfer.buf)
		job.op->xfer.buf = own = malloc(job.op->pages * ISW_PAGE_BYTES);
	if (job.kind == ISWI_JOB_READ && !error)
		memcpy(job.op->xfer.buf, sim->disk + job.op->page * ISW_PAGE_BYTES,
		       job.op->pages * ISW_PAGE_BYTES);
	iswi_backup_done(sim->engine, &job, error);
	free(own);
	return 1;
}

int isw_engine_step(isw_engine *e, uint32_t step, uint32_t r, uint32_t n)
{
	struct iswi_sim *sim = iswi_sim_of(e);

	if (!sim)
		return -EINVAL;
	sim->now_ns += 1000;
	switch (step) {
	case ISW_STEP_BACKUP_TAKE:
		if (sim->jobs_count == ISWI_SIM_JOBS ||
		    !iswi_backup_take(e, r != 0, &sim->jobs[sim->jobs_count]))
			return 0;
		sim->jobs_count++;
		return 1;
	case ISW_STEP_BACKUP_DONE:
		return step_backup_end(sim, n, 0);
	case ISW_STEP_BACKUP_FAIL:
		return step_backup_end(sim, n, r ? -ENODATA : -EIO);
	case ISW_STEP_BACKUP_RETRY:
		return iswi_backup_retry(e);
	case ISW_STEP_BACKUP_SLOW:
		return iswi_backup_slow(e, UINT64_MAX);
	case ISW_STEP_UNPLUG:
		if (iswi_plug_is_empty(&sim->plug))
			return 0;
		iswi_engine_unplug(e, &sim->plug);
		return 1;
	default:
		return step_remote(e, step, r, n);
	}
}

/* -------------------------------------------------------------------------- life */

static uint64_t sim_now_ns(void *ctx)
{
	return ((struct iswi_sim *)ctx)->now_ns;
}

int isw_sim_create(const struct isw_engine_config *config, isw_engine **engine_out,
		   struct isw_error *error)
{
	struct isw_engine *e;
	struct iswi_sim *sim;
	int code;

	code = iswi_engine_make(config, &e, error);
	if (code)
		return code;
	sim = calloc(1, sizeof(*sim));
	sim->engine = e;
	sim->disk = malloc(config->size_bytes);
	memset(sim->disk, 0xdd, config->size_bytes); /* a disk's old contents are not zeros */
	sim->done_tail = &sim->done;
	sim->clock = (struct iswi_clock){sim_now_ns, sim};
	e->clock = &sim->clock;
	e->backup->ops = &sim_backup_ops;
	e->backup->ctx = sim;
	if (!e->standby)
		iswi_arena_ready(e);
	*engine_out = e;
	return 0;
}

/* --------------------------------------------------------------------------- death */

static void copy_donor(struct iswi_sim *sim, const struct iswi_sim_donor *from)
{
	struct isw_engine *e = sim->engine;
	uint64_t slots = from->bytes / e->config.slab_bytes;
	struct iswi_sim_donor *to = calloc(1, sizeof(*to));

	to->engine = e;
	to->remote = from->remote;
	to->bytes = from->bytes;
	to->queues = from->queues;
	to->fenced = from->fenced;
	to->down = true;
	to->memory = malloc(from->bytes);
	memcpy(to->memory, from->memory, from->bytes);
	if (from->slots) {
		to->slots = calloc(slots, sizeof(*to->slots));
		memcpy(to->slots, from->slots, slots * sizeof(*to->slots));
	}
	for (uint32_t i = 0; i < from->late_count; i++)
		add_late(to, from->late[i].offset, from->late[i].length, from->late[i].bytes);
	for (uint32_t i = 0; i < from->pending_count; i++)
		keep_late(to, &from->pending[i]);
	free_donor(sim->donors[to->remote]);
	sim->donors[to->remote] = to;
}

/* The disk as it is when the lock of the backup is free. */
static void copy_disk(struct iswi_sim *sim, const struct iswi_sim *dead, uint64_t landed)
{
	memcpy(sim->disk, dead->disk, sim->engine->config.size_bytes);
	for (uint32_t i = 0; i < dead->jobs_count; i++, landed >>= 2) {
		const struct iswi_job *job = &dead->jobs[i];

		if (job->kind != ISWI_JOB_WRITE || !(landed & 3))
			continue;
		for (uint32_t k = 0; k < job->pages; k++) {
			bool half = (landed & 3) == 1;

			if (half && k > job->pages / 2)
				break;
			memcpy(sim->disk + (job->page + k) * ISW_PAGE_BYTES,
			       dead->engine->staging + (uint64_t)job->slots[k] * ISW_PAGE_BYTES,
			       half && k == job->pages / 2 ? ISW_PAGE_BYTES / 2 : ISW_PAGE_BYTES);
		}
	}
}

int isw_sim_take_over(isw_engine *e, isw_engine *dead, uint64_t landed, struct isw_error *error)
{
	struct iswi_sim *sim = iswi_sim_of(e);
	const struct iswi_sim *from = iswi_sim_of(dead);
	int code;

	if (!sim || !e->standby || !from || e->config.size_bytes != dead->config.size_bytes)
		return iswi_error(error, -EINVAL, "only a stepped standby takes over");
	code = iswi_arena_check(e, error);
	if (code)
		return code;
	copy_disk(sim, from, landed);
	for (uint32_t i = 0; i < ISWI_SIM_REMOTES; i++)
		if (from->donors[i])
			copy_donor(sim, from->donors[i]);
	return iswi_recover(e, error);
}

static void free_sim(struct iswi_sim *sim)
{
	for (uint32_t i = 0; i < ISWI_SIM_REMOTES; i++)
		free_donor(sim->donors[i]);
	free(sim->disk);
	free(sim);
}

void isw_sim_bury(isw_engine *e)
{
	struct iswi_sim *sim = iswi_sim_of(e);

	for (uint32_t i = 0; i < e->config.remotes_max; i++)
		for (uint32_t q = 0; q < e->remotes[i].queues_count; q++)
			free(e->remotes[i].queues[q]);
	while (sim->open)
		free_request(sim->open);
	free_sim(sim);
	iswi_memory_destroy(e);
	iswi_seal_destroy(e);
	iswi_events_fini(&e->events);
	free(e);
}

/* The steps do the disk's reading and writing; the engine itself only syncs, when it settles. */
static int sim_sync(void *ctx)
{
	(void)ctx;
	return 0;
}

/* By isw_engine_destroy: jobs that were not reported hold requests, so they end now. */
static void sim_destroy(void *ctx)
{
	struct iswi_sim *sim = ctx;
	struct isw_sim_request done;

	while (step_backup_end(sim, 0, -EIO) ||
	       isw_engine_step(sim->engine, ISW_STEP_BACKUP_TAKE, 0, 0) ||
	       isw_engine_step(sim->engine, ISW_STEP_BACKUP_TAKE, 1, 0))
		;
	while (isw_sim_reap(sim->engine, &done, NULL, 0))
		;
	free_sim(sim);
}

static const struct iswi_backup_ops sim_backup_ops = {
	.name = "sim",
	.sync = sim_sync,
	.destroy = sim_destroy,
};
