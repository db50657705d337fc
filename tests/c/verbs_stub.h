/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An RDMA device in this process, for the tests of what stands on verbs: two ends that copy memory,
 * by the rules that matter here. A key is valid in its own protection domain only, for the bytes
 * and the access it was made for, until it is freed; a queue pair talks to the one that it was
 * connected to and that was connected to it; it completes in order, with those completions only
 * that were asked for; after an error everything else on it is flushed. One thread is the wire, and
 * takes from the queue pairs in any order.
 *
 * Faults: see struct stub. Whoever breaks the rules of the seam (destroys a parent before its
 * child, overruns a queue) fails the test.
 */
#ifndef ISW_TEST_VERBS_STUB_H
#define ISW_TEST_VERBS_STUB_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "check.h"
#include "util/util.h"
#include "verbs/verbs.h"

#define STUB_PORTS 4u
#define STUB_QPS   256u

struct iswi_vdev {
	int children;
};

struct iswi_vpd {
	struct iswi_vdev *dev;
	int children;
};

struct iswi_vmr {
	struct iswi_vpd *pd;
	struct iswi_vmr *next;
	char *memory;
	uint64_t bytes;
	unsigned int peer;
	struct iswi_verbs_key key;
};

struct iswi_vcq {
	struct iswi_vdev *dev;
	int children, fd;
	bool armed;
	uint32_t entries, first, count;
	struct iswi_verbs_done *done;
};

struct iswi_vqp {
	struct iswi_vpd *pd;
	struct iswi_vcq *cq;
	struct iswi_verbs_qp_config config;
	struct iswi_verbs_path path;
	uint32_t number;
	bool connected, failed;
	uint32_t first, count; /* posted */
	struct iswi_verbs_post *posts;
};

static struct stub {
	pthread_mutex_t lock;
	pthread_cond_t work;
	pthread_t wire;
	bool stop;
	struct isw_rdma_port ports[STUB_PORTS];
	uint32_t port_count;
	struct iswi_vmr *mrs;
	struct iswi_vqp *qps[STUB_QPS];
	uint32_t key_last, qp_last;
	int live; /* objects of every kind */
	uint64_t random;

	/* Faults; under lock. */
	bool frozen;        /* the wire carries nothing */
	uint32_t delay_us;  /* at most, before every eighth transfer or so */
	int mr_makes_left;  /* registrations that succeed before all are -ENOMEM; < 0: all do */
	int mrs_max;        /* registrations at once, more are -ENOMEM; 0: no limit */
	int transfer_error; /* the next transfer fails so, and its queue pair with it */
	int post_error;     /* the next post, after its first transfer */
	int cq_make_error;  /* every cq_make */
	int mr_move_error;  /* every mr_move */
	int pd_make_error;  /* every pd_make: the device has gone */
	int mr_free_error;  /* every mr_free of memory that a peer may write */
	int qp_free_error;  /* every qp_free */
	bool leaving;       /* every device */
	/* What was seen. */
	uint64_t transfers, completions, refused;
	uint64_t opened;    /* devices */
	uint64_t looked_up; /* bytes that were registered, other than by moving */
	uint64_t moved;     /* registrations */
	uint64_t staged;    /* WRITEs from memory that is smaller than any connection's own */
} stub;

static inline pthread_mutex_t *stub_lock(void)
{
	pthread_mutex_lock(&stub.lock);
	return &stub.lock;
}

static inline void stub_unlock(pthread_mutex_t **lock)
{
	pthread_mutex_unlock(*lock);
}

/* From here to the end of the block. */
#define STUB_LOCKED()                                                                              \
	__attribute__((cleanup(stub_unlock), unused)) pthread_mutex_t *locked_ = stub_lock()

static uint32_t stub_below(uint32_t limit)
{
	stub.random = stub.random * 6364136223846793005ull + 1442695040888963407ull;
	return (uint32_t)(stub.random >> 33) % limit;
}

static int stub_ports(struct isw_rdma_port *ports_out, uint32_t max, struct isw_error *error)
{
	if (stub.port_count == 0)
		return iswi_error(error, -ENODEV, "this host has no RDMA device");
	for (uint32_t i = 0; i < stub.port_count && i < max; i++)
		ports_out[i] = stub.ports[i];
	return (int)stub.port_count;
}

/* An object more or less below its parent. Lock held. */
static void stub_count(int *children, int change)
{
	if (children != NULL)
		*children += change;
	stub.live += change;
}

static int stub_open(const char *device, struct iswi_vdev **dev_out, struct isw_error *error)
{
	STUB_LOCKED();

	for (uint32_t i = 0; i < stub.port_count; i++) {
		if (strcmp(stub.ports[i].device, device) != 0)
			continue;
		*dev_out = calloc(1, sizeof(**dev_out));
		stub.opened++;
		stub_count(NULL, 1);
		return 0;
	}
	return iswi_error(error, -ENODEV, "no device %s", device);
}

static void stub_close(struct iswi_vdev *dev)
{
	STUB_LOCKED();

	CHECK_EQ(dev->children, 0);
	stub_count(NULL, -1);
	free(dev);
}

static bool stub_is_leaving(struct iswi_vdev *dev)
{
	STUB_LOCKED();

	(void)dev;
	return stub.leaving;
}

static int stub_pd_make(struct iswi_vdev *dev, struct iswi_vpd **pd_out)
{
	STUB_LOCKED();

	if (stub.pd_make_error != 0)
		return stub.pd_make_error;
	*pd_out = calloc(1, sizeof(**pd_out));
	(*pd_out)->dev = dev;
	stub_count(&dev->children, 1);
	return 0;
}

static void stub_pd_free(struct iswi_vpd *pd)
{
	STUB_LOCKED();

	CHECK_EQ(pd->children, 0);
	stub_count(&pd->dev->children, -1);
	free(pd);
}

static int stub_mr_make(struct iswi_vpd *pd, void *memory, uint64_t bytes, unsigned int peer,
			struct iswi_vmr **mr_out, struct iswi_verbs_key *key_out)
{
	STUB_LOCKED();
	struct iswi_vmr *mr;
	int count = 0;

	for (const struct iswi_vmr *one = stub.mrs; one != NULL; one = one->next)
		count++;
	if (stub.mr_makes_left == 0 || (stub.mrs_max != 0 && count >= stub.mrs_max))
		return -ENOMEM;
	stub.mr_makes_left -= stub.mr_makes_left > 0;
	mr = calloc(1, sizeof(*mr));
	*mr = (struct iswi_vmr){pd, stub.mrs, memory, bytes, peer, {0}};
	mr->key.local = stub.key_last += 7;
	mr->key.remote = stub.key_last += 7;
	stub.mrs = mr;
	stub.looked_up += bytes;
	stub_count(&pd->children, 1);
	*key_out = mr->key;
	*mr_out = mr;
	return 0;
}

static int stub_mr_free(struct iswi_vmr *mr)
{
	STUB_LOCKED();
	struct iswi_vmr **link = &stub.mrs;

	if ((mr->peer & ISWI_VERBS_PEER_WRITES) != 0 && stub.mr_free_error != 0)
		return stub.mr_free_error;
	while (*link != mr)
		link = &(*link)->next;
	*link = mr->next;
	stub_count(&mr->pd->children, -1);
	free(mr);
	return 0;
}

/* The key stays, as that of soft-RoCE does. */
static int stub_mr_move(struct iswi_vmr *mr, struct iswi_vpd *pd, unsigned int peer,
			struct iswi_verbs_key *key_out)
{
	STUB_LOCKED();

	if (stub.mr_move_error != 0)
		return stub.mr_move_error;
	CHECK(pd->dev == mr->pd->dev);
	mr->pd->children--;
	pd->children++;
	mr->pd = pd;
	mr->peer = peer;
	stub.moved++;
	*key_out = mr->key;
	return 0;
}

static int stub_cq_make(struct iswi_vdev *dev, uint32_t entries, struct iswi_vcq **cq_out,
			int *fd_out)
{
	STUB_LOCKED();
	struct iswi_vcq *cq;

	if (stub.cq_make_error != 0)
		return stub.cq_make_error;
	cq = calloc(1, sizeof(*cq));
	cq->dev = dev;
	cq->entries = entries;
	cq->done = calloc(entries, sizeof(*cq->done));
	cq->fd = fd_out == NULL ? -1 : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (fd_out != NULL)
		*fd_out = cq->fd;
	stub_count(&dev->children, 1);
	*cq_out = cq;
	return 0;
}

static void stub_cq_free(struct iswi_vcq *cq)
{
	STUB_LOCKED();

	CHECK_EQ(cq->children, 0);
	stub_count(&cq->dev->children, -1);
	if (cq->fd >= 0)
		close(cq->fd);
	free(cq->done);
	free(cq);
}

static int stub_qp_make(struct iswi_vpd *pd, struct iswi_vcq *cq,
			const struct iswi_verbs_qp_config *config, struct iswi_vqp **qp_out,
			uint32_t *number_out)
{
	STUB_LOCKED();
	struct iswi_vqp *qp = calloc(1, sizeof(*qp));
	uint32_t at = 0;

	qp->pd = pd;
	qp->cq = cq;
	qp->config = *config;
	qp->posts = calloc(config->sends_max, sizeof(*qp->posts));
	while (stub.qps[at] != NULL)
		CHECK(++at < STUB_QPS);
	stub.qps[at] = qp;
	qp->number = ++stub.qp_last;
	cq->children++;
	stub_count(&pd->children, 1);
	*number_out = qp->number;
	*qp_out = qp;
	return 0;
}

static int stub_qp_connect(struct iswi_vqp *qp, const struct iswi_verbs_path *path)
{
	STUB_LOCKED();

	CHECK(!qp->connected);
	CHECK_EQ(path->port, qp->config.port);
	CHECK(path->mtu_bytes >= 256 && path->mtu_bytes <= 4096 && path->reads_max > 0);
	qp->path = *path;
	qp->connected = true;
	pthread_cond_broadcast(&stub.work);
	return 0;
}

/* Lock held. */
static void stub_complete(struct iswi_vcq *cq, uint64_t id, int error)
{
	uint64_t one = 1;

	CHECK(cq->count < cq->entries); /* overrun */
	cq->done[(cq->first + cq->count++) % cq->entries] =
		(struct iswi_verbs_done){.id = id, .error = error, .text = "of the stub"};
	stub.completions++;
	if (!cq->armed || cq->fd < 0)
		return;
	cq->armed = false;
	CHECK_EQ(write(cq->fd, &one, sizeof(one)), sizeof(one));
}

/* Lock held. */
static void stub_flush(struct iswi_vqp *qp)
{
	qp->failed = true;
	for (; qp->count > 0; qp->count--, qp->first++)
		stub_complete(qp->cq, qp->posts[qp->first % qp->config.sends_max].id, -ECANCELED);
}

static int stub_qp_fail(struct iswi_vqp *qp)
{
	STUB_LOCKED();

	stub_flush(qp);
	return 0;
}

static int stub_qp_free(struct iswi_vqp *qp)
{
	STUB_LOCKED();

	if (stub.qp_free_error != 0)
		return stub.qp_free_error;
	for (uint32_t i = 0; i < STUB_QPS; i++)
		if (stub.qps[i] == qp)
			stub.qps[i] = NULL;
	qp->cq->children--;
	stub_count(&qp->pd->children, -1);
	free(qp->posts);
	free(qp);
	return 0;
}

/* Lock held. NULL: no such key there, or not for that. */
static const struct iswi_vmr *stub_region(const struct iswi_vpd *pd, uint32_t key, bool remote,
					  uintptr_t at, uint32_t bytes, unsigned int access)
{
	for (const struct iswi_vmr *mr = stub.mrs; mr != NULL; mr = mr->next)
		if (mr->pd == pd && (remote ? mr->key.remote : mr->key.local) == key &&
		    at >= (uintptr_t)mr->memory && bytes <= mr->bytes &&
		    at - (uintptr_t)mr->memory <= mr->bytes - bytes &&
		    (!remote || (mr->peer & access) == access))
			return mr;
	return NULL;
}

/* Lock held. */
static struct iswi_vqp *stub_peer(const struct iswi_vqp *qp)
{
	for (uint32_t i = 0; i < STUB_QPS; i++) {
		struct iswi_vqp *peer = stub.qps[i];

		if (peer != NULL && peer->number == qp->path.peer.number && peer->connected &&
		    !peer->failed && peer->path.peer.number == qp->number &&
		    peer->path.psn == qp->path.peer.psn && qp->path.psn == peer->path.peer.psn)
			return peer;
	}
	return NULL;
}

/* Lock held. */
static int stub_carry(const struct iswi_vqp *qp, const struct iswi_verbs_post *post)
{
	const struct iswi_vqp *peer = stub_peer(qp);
	unsigned int access = post->write ? ISWI_VERBS_PEER_WRITES : ISWI_VERBS_PEER_READS;
	const struct iswi_vmr *ours;
	void *theirs = (void *)(uintptr_t)post->remote;

	if (stub.transfer_error != 0) {
		int error = stub.transfer_error;

		stub.transfer_error = 0;
		return error;
	}
	if (peer == NULL)
		return -ETIMEDOUT;
	ours = stub_region(qp->pd, post->lkey, false, (uintptr_t)post->local, post->length, 0);
	if (ours == NULL)
		return -EIO;
	if (stub_region(peer->pd, post->rkey, true, post->remote, post->length, access) == NULL ||
	    (peer->config.peer & access) == 0) {
		stub.refused++;
		return -EACCES;
	}
	memcpy(post->write ? theirs : post->local, post->write ? post->local : theirs,
	       post->length);
	stub.transfers++;
	stub.staged += post->write && ours->bytes < (2u << 20);
	return 0;
}

/* Lock held. Any of those that have something to carry. */
static struct iswi_vqp *stub_pick(void)
{
	uint32_t from = stub_below(STUB_QPS);

	for (uint32_t i = 0; i < STUB_QPS && !stub.frozen; i++) {
		struct iswi_vqp *qp = stub.qps[(from + i) % STUB_QPS];

		if (qp != NULL && qp->count > 0)
			return qp;
	}
	return NULL;
}

static void *stub_wire(void *arg)
{
	(void)arg;
	pthread_mutex_lock(&stub.lock);
	while (!stub.stop) {
		struct iswi_vqp *qp = stub_pick();
		struct iswi_verbs_post post;
		int error;

		if (qp == NULL) {
			pthread_cond_wait(&stub.work, &stub.lock);
			continue;
		}
		if (stub.delay_us > 0 && stub_below(8) == 0) {
			uint32_t us = stub_below(stub.delay_us);

			pthread_mutex_unlock(&stub.lock);
			usleep(us);
			pthread_mutex_lock(&stub.lock);
			qp = stub_pick(); /* it may have gone meanwhile */
			if (qp == NULL)
				continue;
		}
		post = qp->posts[qp->first++ % qp->config.sends_max];
		qp->count--;
		error = stub_carry(qp, &post);
		if (error != 0 || post.signalled)
			stub_complete(qp->cq, post.id, error);
		if (error != 0)
			stub_flush(qp);
	}
	pthread_mutex_unlock(&stub.lock);
	return NULL;
}

static int stub_post(struct iswi_vqp *qp, const struct iswi_verbs_post *posts, uint32_t *count)
{
	STUB_LOCKED();
	int code = 0;

	CHECK(qp->connected);
	if (stub.post_error != 0) {
		code = stub.post_error;
		stub.post_error = 0;
		*count = 1;
	}
	for (uint32_t i = 0; i < *count; i++) {
		if (qp->failed) {
			stub_complete(qp->cq, posts[i].id, -ECANCELED);
			continue;
		}
		CHECK(qp->count < qp->config.sends_max);
		qp->posts[(qp->first + qp->count++) % qp->config.sends_max] = posts[i];
	}
	pthread_cond_broadcast(&stub.work);
	return code;
}

static int stub_poll(struct iswi_vcq *cq, struct iswi_verbs_done *done_out, uint32_t max)
{
	STUB_LOCKED();
	int count = 0;

	for (; cq->count > 0 && (uint32_t)count < max; cq->count--)
		done_out[count++] = cq->done[cq->first++ % cq->entries];
	cq->first %= cq->entries;
	return count;
}

static int stub_arm(struct iswi_vcq *cq)
{
	STUB_LOCKED();
	uint64_t count;

	if (read(cq->fd, &count, sizeof(count)) < 0)
		CHECK_EQ(errno, EAGAIN);
	cq->armed = true;
	return 0;
}

static const struct iswi_verbs stub_verbs = {
	.name = "stub",
	.ports = stub_ports,
	.open = stub_open,
	.close = stub_close,
	.is_leaving = stub_is_leaving,
	.pd_make = stub_pd_make,
	.pd_free = stub_pd_free,
	.mr_make = stub_mr_make,
	.mr_free = stub_mr_free,
	.mr_move = stub_mr_move,
	.cq_make = stub_cq_make,
	.cq_free = stub_cq_free,
	.qp_make = stub_qp_make,
	.qp_connect = stub_qp_connect,
	.qp_free = stub_qp_free,
	.qp_fail = stub_qp_fail,
	.post = stub_post,
	.poll = stub_poll,
	.arm = stub_arm,
};

/* ------------------------------------------------------------------------- for tests */

#define STUB_SET(field, value)                                                                     \
	do {                                                                                       \
		STUB_LOCKED();                                                                     \
                                                                                                   \
		stub.field = (value);                                                              \
		pthread_cond_broadcast(&stub.work);                                                \
	} while (0)

static __attribute__((unused)) void stub_gid(struct isw_rdma_port *port, const uint8_t *raw,
					     uint32_t type)
{
	struct isw_rdma_gid *gid = &port->gid[port->gids];

	memcpy(gid->raw, raw, sizeof(gid->raw));
	gid->index = port->gids++;
	gid->type = type;
}

/* A port as soft-RoCE on a loopback interface has it: what is wanted stands last. */
static struct isw_rdma_port *stub_port(const char *device)
{
	static const uint8_t local[16] = {0xfe, 0x80, [15] = 1};
	static const uint8_t loopback[16] = {[10] = 0xff, 0xff, 127, 0, 0, 1};
	struct isw_rdma_port *port = &stub.ports[stub.port_count++];

	*port = (struct isw_rdma_port){
		.port = 1,
		.link = ISW_RDMA_LINK_ETHERNET,
		.active = 1,
		.mtu_bytes = 4096,
		.reads_max = 128,
		.sends_max = 4096,
		.qps_max = STUB_QPS,
	};
	snprintf(port->device, sizeof(port->device), "%s", device);
	stub_gid(port, local, ISW_RDMA_GID_ROCE_V2);
	stub_gid(port, loopback, ISW_RDMA_GID_OTHER);
	stub_gid(port, loopback, ISW_RDMA_GID_ROCE_V2);
	return port;
}

static __attribute__((unused)) void stub_start(void)
{
	memset(&stub, 0, sizeof(stub));
	stub.random = iswi_now_ns();
	stub.mr_makes_left = -1;
	pthread_mutex_init(&stub.lock, NULL);
	pthread_cond_init(&stub.work, NULL);
	stub_port("stub0");
	CHECK_EQ(pthread_create(&stub.wire, NULL, stub_wire, NULL), 0);
}

/* Nothing must be left of what was made. */
static __attribute__((unused)) void stub_stop(void)
{
	STUB_SET(stop, true);
	pthread_join(stub.wire, NULL);
	CHECK_EQ(stub.live, 0);
}

#endif
