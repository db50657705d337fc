/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The FUSE front end's requests: their buffers, what they say, their answers. Nothing here
 * allocates once the buffers exist.
 */
#include <errno.h>
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/fuse.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "frontend/fuse_frontend.h"
#include "util/util.h"

#define MESSAGE_HEAD_BYTES (sizeof(struct fuse_in_header) + sizeof(struct fuse_write_in))
/* The kernel refuses a shorter read of /dev/fuse. */
#define DATA_BYTES_MIN FUSE_MIN_READ_BUFFER

static char *slot_data(struct iswi_fuse_slot *slot)
{
	return (char *)slot + ISW_PAGE_BYTES;
}

char *iswi_fuse_message(struct iswi_fuse_slot *slot)
{
	return slot_data(slot) - MESSAGE_HEAD_BYTES;
}

size_t iswi_fuse_message_bytes_max(const struct iswi_fuse *fe)
{
	return fe->slot_bytes - ISW_PAGE_BYTES + MESSAGE_HEAD_BYTES;
}

static const void *message_arg(struct iswi_fuse_slot *slot)
{
	return iswi_fuse_message(slot) + sizeof(struct fuse_in_header);
}

/* ------------------------------------------------------------------ buffers */

struct iswi_fuse_slot *iswi_fuse_slot_take(struct iswi_fuse *fe)
{
	struct iswi_fuse_slot *slot;

	pthread_mutex_lock(&fe->lock);
	while (!fe->free) {
		if (iswi_plug_is_empty(&fe->plug)) {
			pthread_cond_wait(&fe->changed, &fe->lock);
			continue;
		}
		pthread_mutex_unlock(&fe->lock);
		iswi_engine_unplug(fe->engine, &fe->plug);
		pthread_mutex_lock(&fe->lock);
	}
	slot = fe->free;
	fe->free = slot->next;
	fe->slots_free--;
	pthread_mutex_unlock(&fe->lock);
	return slot;
}

void iswi_fuse_slot_put(struct iswi_fuse_slot *slot)
{
	struct iswi_fuse *fe = slot->fe;

	pthread_mutex_lock(&fe->lock);
	slot->next = fe->free;
	fe->free = slot;
	fe->slots_free++;
	pthread_cond_broadcast(&fe->changed);
	pthread_mutex_unlock(&fe->lock);
}

int iswi_fuse_slots_init(struct iswi_fuse *fe)
{
	size_t data_bytes = ISWI_MAX(fe->request_bytes, (uint32_t)DATA_BYTES_MIN);
	uint32_t i;

	_Static_assert(sizeof(struct iswi_fuse_slot) + MESSAGE_HEAD_BYTES <= ISW_PAGE_BYTES,
		       "a slot and a message head share one page");
	fe->slot_bytes = ISW_PAGE_BYTES + data_bytes;
	fe->memory = mmap(NULL, fe->slot_bytes * fe->slots_max, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (fe->memory == MAP_FAILED) {
		fe->memory = NULL;
		return -errno;
	}
	/* A child of this process must not make us copy these pages on write. */
	(void)madvise(fe->memory, fe->slot_bytes * fe->slots_max, MADV_DONTFORK);
	/* Pages in clear. */
	(void)madvise(fe->memory, fe->slot_bytes * fe->slots_max, MADV_DONTDUMP);
	for (i = 0; i < fe->slots_max; i++) {
		struct iswi_fuse_slot *slot =
			(struct iswi_fuse_slot *)(fe->memory + i * fe->slot_bytes);

		slot->fe = fe;
		slot->next = fe->free;
		fe->free = slot;
	}
	fe->slots_free = fe->slots_max;
	return 0;
}

/* ------------------------------------------------------------------- answers */

/*
 * error: 0 or negative errno. A failed write means that nobody waits now (the request was
 * aborted or the file system unmounted), so there is nobody to tell.
 */
static void reply(struct iswi_fuse *fe, uint64_t unique, int error, const void *data, size_t bytes)
{
	struct fuse_out_header head = {.unique = unique, .error = error};
	struct iovec parts[2] = {
		{.iov_base = &head, .iov_len = sizeof(head)},
		{.iov_base = (void *)data, .iov_len = bytes},
	};
	int count = error || bytes == 0 ? 1 : 2;
	ssize_t written;

	head.len = (uint32_t)(sizeof(head) + (count == 2 ? bytes : 0));
	do
		written = writev(fe->fd, parts, count);
	while (written < 0 && errno == EINTR);
}

static void reply_write(struct iswi_fuse *fe, uint64_t unique, uint32_t bytes)
{
	struct fuse_write_out out = {.size = bytes};

	reply(fe, unique, 0, &out, sizeof(out));
}

/* On any thread of the engine, or on ours inside submit. */
static void request_done(struct iswi_req *req, int error)
{
	struct iswi_fuse_slot *slot = ISWI_CONTAINER(req, struct iswi_fuse_slot, req);

	if (error)
		reply(slot->fe, slot->unique, error, NULL, 0);
	else if (req->op == ISWI_READ)
		reply(slot->fe, slot->unique, 0, req->data, req->length);
	else if (req->op == ISWI_WRITE)
		reply_write(slot->fe, slot->unique, (uint32_t)req->length);
	else
		reply(slot->fe, slot->unique, 0, NULL, 0);
	iswi_fuse_slot_put(slot);
}

/* ------------------------------------------------------- requests for pages */

/*
 * Each parser fills slot->req from the message. Returns SUBMIT, ANSWERED (nothing is left to do,
 * the answer was sent) or a negative errno to answer with.
 */
#define SUBMIT   0
#define ANSWERED 1

static int check_range(const struct iswi_fuse *fe, uint64_t offset, uint64_t length)
{
	if (offset % ISW_PAGE_BYTES || length % ISW_PAGE_BYTES)
		return -EINVAL;
	if (offset > fe->size_bytes || length > fe->size_bytes - offset)
		return -ENOSPC;
	return 0;
}

static int parse_read(struct iswi_fuse *fe, struct iswi_fuse_slot *slot)
{
	const struct fuse_read_in *in = message_arg(slot);
	uint64_t length = in->size;
	int err;

	if (in->offset >= fe->size_bytes) {
		reply(fe, slot->unique, 0, NULL, 0); /* end of file */
		return ANSWERED;
	}
	length = ISWI_MIN(length, fe->size_bytes - in->offset);
	err = check_range(fe, in->offset, length);
	if (err)
		return err;
	if (length == 0 || length > fe->request_bytes)
		return -EINVAL;
	slot->req.op = ISWI_READ;
	slot->req.offset = in->offset;
	slot->req.length = length;
	return SUBMIT;
}

static int parse_write(struct iswi_fuse *fe, struct iswi_fuse_slot *slot, size_t bytes)
{
	const struct fuse_write_in *in = message_arg(slot);
	int err;

	if (bytes != MESSAGE_HEAD_BYTES + in->size)
		return -EIO;
	err = check_range(fe, in->offset, in->size);
	if (err)
		return err;
	if (in->size == 0 || in->size > fe->request_bytes)
		return -EINVAL;
	slot->req.op = ISWI_WRITE;
	/* The kernel leaves O_DSYNC of a direct write to us; O_SYNC contains its bit. */
	slot->req.flags = in->flags & O_DSYNC ? ISWI_REQ_FUA : 0;
	slot->req.offset = in->offset;
	slot->req.length = in->size;
	return SUBMIT;
}

static int parse_fallocate(struct iswi_fuse *fe, struct iswi_fuse_slot *slot)
{
	const struct fuse_fallocate_in *in = message_arg(slot);
	uint32_t kind = in->mode & ~(uint32_t)FALLOC_FL_KEEP_SIZE;
	int err = check_range(fe, in->offset, in->length);

	if (kind != 0 && kind != FALLOC_FL_PUNCH_HOLE && kind != FALLOC_FL_ZERO_RANGE)
		return -EOPNOTSUPP;
	if (err)
		return err;
	if (kind == 0 || in->length == 0) {
		reply(fe, slot->unique, 0, NULL, 0); /* all of the file is there already */
		return ANSWERED;
	}
	slot->req.op = kind == FALLOC_FL_PUNCH_HOLE ? ISWI_TRIM : ISWI_ZERO;
	slot->req.offset = in->offset;
	slot->req.length = in->length;
	return SUBMIT;
}

/* libfuse 3.14 cannot ask for parallel direct writes, so OPEN is answered here. */
static int answer_open(struct iswi_fuse *fe, struct iswi_fuse_slot *slot)
{
	const struct fuse_open_in *in = message_arg(slot);
	struct fuse_open_out out = {.open_flags = FOPEN_DIRECT_IO};

	if (in->flags & O_TRUNC)
		return -EPERM; /* the size is the device's */
#ifdef FOPEN_PARALLEL_DIRECT_WRITES
	out.open_flags |= FOPEN_PARALLEL_DIRECT_WRITES;
#endif
#ifdef FOPEN_NOFLUSH
	out.open_flags |= FOPEN_NOFLUSH; /* nothing is cached that a close would have to write */
#endif
	reply(fe, slot->unique, 0, &out, sizeof(out));
	return ANSWERED;
}

static int parse_fsync(struct iswi_fuse_slot *slot)
{
	slot->req.op = ISWI_FLUSH;
	return SUBMIT;
}

static size_t arg_bytes_min(uint32_t opcode)
{
	switch (opcode) {
	case FUSE_READ:
		return sizeof(struct fuse_read_in);
	case FUSE_WRITE:
		return sizeof(struct fuse_write_in);
	case FUSE_FALLOCATE:
		return sizeof(struct fuse_fallocate_in);
	case FUSE_OPEN:
		return sizeof(struct fuse_open_in);
	case FUSE_FSYNC:
		return sizeof(struct fuse_fsync_in);
	default:
		return 0;
	}
}

static int parse_disk_request(struct iswi_fuse *fe, struct iswi_fuse_slot *slot, size_t bytes)
{
	const struct fuse_in_header *in = (void *)iswi_fuse_message(slot);

	slot->unique = in->unique;
	slot->req = (struct iswi_req){.data = slot_data(slot), .done = request_done};
	if (bytes < sizeof(*in) + arg_bytes_min(in->opcode))
		return -EIO;
	switch (in->opcode) {
	case FUSE_READ:
		return parse_read(fe, slot);
	case FUSE_WRITE:
		return parse_write(fe, slot, bytes);
	case FUSE_FALLOCATE:
		return parse_fallocate(fe, slot);
	case FUSE_FSYNC:
		return parse_fsync(slot);
	default:
		return answer_open(fe, slot);
	}
}

enum iswi_fuse_handled iswi_fuse_handle(struct iswi_fuse *fe, struct iswi_fuse_slot *slot,
					size_t bytes)
{
	const struct fuse_in_header *in = (void *)iswi_fuse_message(slot);
	int next;

	/*
	 * An interrupted request is answered when it is done, as any other; libfuse would keep a
	 * record of each INTERRUPT whose request it does not know. INTERRUPT itself has no answer.
	 */
	if (in->opcode == FUSE_INTERRUPT)
		return ISWI_FUSE_ANSWERED;
	if (in->nodeid != ISWI_FUSE_DISK_NODE || arg_bytes_min(in->opcode) == 0)
		return ISWI_FUSE_NOT_OURS;
	next = parse_disk_request(fe, slot, bytes);
	if (next == SUBMIT) {
		iswi_engine_submit_plugged(fe->engine, &slot->req, &fe->plug);
		return ISWI_FUSE_TAKEN;
	}
	if (next < 0)
		reply(fe, slot->unique, next, NULL, 0);
	return ISWI_FUSE_ANSWERED;
}
