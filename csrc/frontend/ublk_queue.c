// SPDX-License-Identifier: Apache-2.0
#include "frontend/ublk_queue.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include "util/util.h"

/* user_data of the read of wake_fd; a tag's commands have its number. */
#define WAKE UINT64_MAX
/* What is written to wake_fd: announcements are counted in the lower half. */
#define ANNOUNCE 1ull
#define STOP     (1ull << 32)

static void wake(struct iswi_ublk_queue *queue, uint64_t value)
{
	if (write(queue->wake_fd, &value, sizeof(value)) < 0) {
		/* Only a full counter could fail, and then it is readable all the same. */
	}
}

static enum iswi_ublk_phase set_phase(struct iswi_ublk_queue *queue, enum iswi_ublk_phase phase,
				      int error)
{
	enum iswi_ublk_phase before;

	pthread_mutex_lock(&queue->lock);
	before = queue->phase;
	queue->phase = phase;
	queue->error = error;
	pthread_cond_broadcast(&queue->changed);
	pthread_mutex_unlock(&queue->lock);
	return before;
}

/* -------------------------------------------------------------------- the ring */

/*
 * Cooperative task work: no interrupt of the thread when the kernel hands a request over while it
 * is busy with others. (DEFER_TASKRUN would batch more. With it a queue's thread was seen in a soft
 * lockup under swap, on Linux 6.12 in a starved virtual machine; until that is understood it stays
 * out.)
 */
static int open_ring(struct iswi_ublk_queue *queue)
{
	const unsigned int entries = queue->depth + 1u; /* and the read of wake_fd */
	int err = io_uring_queue_init(entries, &queue->ring, IORING_SETUP_COOP_TASKRUN);

	if (err == 0)
		io_uring_ring_dontfork(&queue->ring);
	return err;
}

/* There is a place for each: a tag has one command at a time, and so has wake_fd. */
static struct io_uring_sqe *next_sqe(struct iswi_ublk_queue *queue)
{
	struct io_uring_sqe *sqe = io_uring_get_sqe(&queue->ring);

	if (sqe == NULL)
		abort();
	memset(sqe, 0, sizeof(*sqe));
	return sqe;
}

static void put_command(struct iswi_ublk_queue *queue, uint32_t op, const struct iswi_ublk_tag *tag)
{
	struct io_uring_sqe *sqe = next_sqe(queue);
	struct ublksrv_io_cmd *cmd = (struct ublksrv_io_cmd *)sqe->cmd;

	sqe->opcode = IORING_OP_URING_CMD;
	sqe->fd = queue->device_fd;
	sqe->cmd_op = op;
	io_uring_sqe_set_data64(sqe, tag->number);
	cmd->q_id = queue->number;
	cmd->tag = tag->number;
	cmd->result = tag->result;
	cmd->addr = (uintptr_t)tag->req.data;
}

static void arm_wake(struct iswi_ublk_queue *queue)
{
	struct io_uring_sqe *sqe;

	if (queue->wake_armed)
		return;
	sqe = next_sqe(queue);
	io_uring_prep_read(sqe, queue->wake_fd, &queue->wake_value, sizeof(queue->wake_value), 0);
	io_uring_sqe_set_data64(sqe, WAKE);
	queue->wake_armed = true;
}

/* -------------------------------------------------------------------- requests */

/* On any thread of the engine, or on ours inside submit. */
static void request_done(struct iswi_req *req, int error)
{
	struct iswi_ublk_tag *tag = ISWI_CONTAINER(req, struct iswi_ublk_tag, req);
	struct iswi_ublk_queue *queue = tag->queue;
	const bool foreign = !pthread_equal(pthread_self(), queue->thread);

	tag->result = iswi_ublk_result(req, error);
	tag->foreign = foreign;
	/*
	 * After the push the tag may be in the kernel's hands again. The queue is there until this
	 * announcement has been read: see finished().
	 */
	if (iswi_ublk_ended_push(&queue->ended, tag) && foreign)
		wake(queue, ANNOUNCE);
}

static void take_request(struct iswi_ublk_queue *queue, struct iswi_ublk_tag *tag)
{
	int err = iswi_ublk_parse(&queue->descs[tag->number], tag);

	queue->busy++;
	if (err == 0 && queue->engine == NULL)
		err = -EIO;
	if (err != 0)
		request_done(&tag->req, err);
	else
		iswi_engine_submit_plugged(queue->engine, &tag->req, &queue->plug);
}

/* The results of what has ended go to the kernel, with the tags' next requests asked for. */
static void commit_ended(struct iswi_ublk_queue *queue)
{
	struct iswi_ublk_tag *tag = iswi_ublk_ended_take(&queue->ended);

	/* Whoever found the list empty announces it: the oldest of the batch. */
	if (tag != NULL && tag->foreign)
		queue->batches++;
	for (; tag != NULL; tag = tag->next) {
		put_command(queue, UBLK_U_IO_COMMIT_AND_FETCH_REQ, tag);
		queue->busy--;
	}
}

static void woken(struct iswi_ublk_queue *queue, int result)
{
	queue->wake_armed = false;
	if (result != sizeof(queue->wake_value))
		return; /* interrupted: armed again */
	queue->announced += (uint32_t)queue->wake_value;
	if (queue->wake_value >= STOP)
		queue->stopping = true;
}

/*
 * ABORT: the device has ended, and every command comes back so. Anything else means that the kernel
 * refused one, with an answer on it perhaps: its request would wait for ever. A queue that has
 * ended can be taken over with all that was not answered; so it takes nothing more and ends.
 */
static void given_back(struct iswi_ublk_queue *queue, int result)
{
	queue->live--;
	if (result != UBLK_IO_RES_ABORT && queue->failed == 0)
		queue->failed = result < 0 ? result : -EPROTO;
}

static void take_completions(struct iswi_ublk_queue *queue)
{
	struct io_uring_cqe *cqe;
	unsigned int head, count = 0;

	io_uring_for_each_cqe(&queue->ring, head, cqe)
	{
		uint64_t number = io_uring_cqe_get_data64(cqe);

		count++;
		if (number == WAKE)
			woken(queue, cqe->res);
		else if (cqe->res != UBLK_IO_RES_OK)
			given_back(queue, cqe->res);
		else if (queue->failed == 0)
			take_request(queue, &queue->tags[number]);
	}
	io_uring_cq_advance(&queue->ring, count);
	if (!iswi_plug_is_empty(&queue->plug))
		iswi_engine_unplug(queue->engine, &queue->plug);
}

/*
 * Nothing of the device is in the engine, and no thread of the engine is between its push and its
 * announcement, where it still needs the queue.
 */
static bool finished(const struct iswi_ublk_queue *queue)
{
	return queue->busy == 0 && queue->batches == queue->announced &&
	       (queue->live == 0 || queue->stopping || queue->failed != 0);
}

static int outcome(const struct iswi_ublk_queue *queue)
{
	if (queue->stopping)
		return 0;
	return queue->failed != 0 ? queue->failed : -ENODEV;
}

static int serve(struct iswi_ublk_queue *queue)
{
	for (;;) {
		int result;

		commit_ended(queue);
		if (finished(queue))
			return outcome(queue);
		arm_wake(queue);
		result = io_uring_submit_and_wait(&queue->ring, 1);
		/* EAGAIN and EBUSY: the kernel lacks memory for a moment; what is left is tried
		 * again. */
		if (result < 0 && result != -EINTR && result != -EAGAIN && result != -EBUSY)
			return result;
		take_completions(queue);
	}
}

/* Until the device is started there are no requests: an answer is a refusal. */
static int fetch_all(struct iswi_ublk_queue *queue)
{
	struct io_uring_cqe *cqe;
	uint32_t submitted = 0;

	for (uint32_t i = 0; i < queue->depth; i++)
		put_command(queue, UBLK_U_IO_FETCH_REQ, &queue->tags[i]);
	while (submitted < queue->depth) {
		int result = io_uring_submit(&queue->ring);

		if (result < 0 && result != -EINTR && result != -EAGAIN)
			return result;
		submitted += result > 0 ? (uint32_t)result : 0;
	}
	queue->live = queue->depth;
	if (io_uring_peek_cqe(&queue->ring, &cqe) == 0)
		return cqe->res < 0 ? cqe->res : -EPROTO;
	return 0;
}

/* -------------------------------------------------------------------- the thread */

/* False: the queue ends without having served. */
static bool wait_order(struct iswi_ublk_queue *queue)
{
	bool go;

	pthread_mutex_lock(&queue->lock);
	while (!queue->ordered && !queue->quit)
		pthread_cond_wait(&queue->changed, &queue->lock);
	go = queue->ordered && !queue->quit;
	pthread_mutex_unlock(&queue->lock);
	return go;
}

static void *queue_thread(void *arg)
{
	struct iswi_ublk_queue *queue = arg;
	bool served = false;
	int err = open_ring(queue);

	queue->thread = pthread_self(); /* the creator may not have stored it yet */
	iswi_thread_urgent();
	if (err == 0) {
		set_phase(queue, ISWI_UBLK_PARKED, 0);
		if (wait_order(queue)) {
			err = fetch_all(queue);
			if (err == 0) {
				set_phase(queue, ISWI_UBLK_FETCHING, 0);
				err = serve(queue);
				served = true;
			}
		}
		io_uring_queue_exit(&queue->ring);
	}
	set_phase(queue, ISWI_UBLK_ENDED, err);
	if (served && err != 0)
		queue->down(queue->ctx, err);
	return NULL;
}

static int make_buffers(struct iswi_ublk_queue *queue)
{
	const size_t bytes = (size_t)queue->depth * queue->request_bytes;

	queue->tags = calloc(queue->depth, sizeof(*queue->tags));
	if (queue->tags == NULL)
		return -ENOMEM;
	queue->buffers = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
			      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (queue->buffers == MAP_FAILED) {
		queue->buffers = NULL;
		return -errno;
	}
	/* A child of this process must not make us copy these pages on write. */
	(void)madvise(queue->buffers, bytes, MADV_DONTFORK);
	/* Pages in clear. */
	(void)madvise(queue->buffers, bytes, MADV_DONTDUMP);
	for (uint16_t i = 0; i < queue->depth; i++) {
		struct iswi_ublk_tag *tag = &queue->tags[i];

		tag->queue = queue;
		tag->number = i;
		tag->req.data = queue->buffers + (size_t)i * queue->request_bytes;
		tag->req.done = request_done;
	}
	return 0;
}

int iswi_ublk_queue_start(struct iswi_ublk_queue *queue)
{
	char name[16];
	pthread_t thread;
	int err;

	pthread_mutex_init(&queue->lock, NULL);
	pthread_cond_init(&queue->changed, NULL);
	/* Blocking, as the ring waits for it: io_uring answers EAGAIN for the other kind. */
	queue->wake_fd = eventfd(0, EFD_CLOEXEC);
	err = queue->wake_fd < 0 ? -errno : make_buffers(queue);
	if (err == 0) {
		snprintf(name, sizeof(name), "isw-ublk-%u", (unsigned int)queue->number);
		err = iswi_thread_start(&thread, name, queue_thread, queue);
	}
	if (err != 0) {
		set_phase(queue, ISWI_UBLK_ENDED, err);
		return err;
	}
	queue->started = thread;
	queue->has_thread = true;
	return 0;
}

int iswi_ublk_queue_wait(struct iswi_ublk_queue *queue, enum iswi_ublk_phase phase)
{
	int err;

	pthread_mutex_lock(&queue->lock);
	while (queue->phase < phase)
		pthread_cond_wait(&queue->changed, &queue->lock);
	err = queue->phase == ISWI_UBLK_ENDED && phase != ISWI_UBLK_ENDED ? queue->error : 0;
	pthread_mutex_unlock(&queue->lock);
	return err;
}

void iswi_ublk_queue_order(struct iswi_ublk_queue *queue, int device_fd,
			   const struct ublksrv_io_desc *descs)
{
	pthread_mutex_lock(&queue->lock);
	queue->device_fd = device_fd;
	queue->descs = descs;
	queue->ordered = true;
	pthread_cond_broadcast(&queue->changed);
	pthread_mutex_unlock(&queue->lock);
}

void iswi_ublk_queue_stop(struct iswi_ublk_queue *queue)
{
	if (!queue->has_thread)
		return;
	pthread_mutex_lock(&queue->lock);
	queue->quit = true;
	pthread_cond_broadcast(&queue->changed);
	pthread_mutex_unlock(&queue->lock);
	wake(queue, STOP);
	pthread_join(queue->started, NULL);
	queue->has_thread = false;
}

void iswi_ublk_queue_free(struct iswi_ublk_queue *queue)
{
	if (queue->buffers != NULL)
		munmap(queue->buffers, (size_t)queue->depth * queue->request_bytes);
	free(queue->tags);
	if (queue->wake_fd >= 0)
		close(queue->wake_fd);
	pthread_cond_destroy(&queue->changed);
	pthread_mutex_destroy(&queue->lock);
}
