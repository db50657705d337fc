// SPDX-License-Identifier: Apache-2.0
/*
 * libFuzzer over the NBD server: handshake and transmission, memory-backed (the donor's real
 * store, one lease, one empty slot, and a neighbour whose bytes must stay out of reach) and
 * asynchronous. No socket: the calls the server makes on one are answered here (linked with
 * --wrap), cut into pieces of every size, so that a crash comes back with its input. What is
 * checked beside the sanitizers: nothing is received into or sent from a slab that is not the
 * client's, holds and requests all come back, the neighbour's bytes stay as they were.
 *
 * Input: a byte of choices (see enum), a seed of sizes, then what the client says.
 * Built and run by tests/fuzz/fuzzers.py.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

#include "store/store.h"
#include "wire/nbd_conn.h"

#define SLAB_BYTES     8192u
#define OWN_SLABS      2u
#define NEIGHBOURS     2u
#define SLABS          (OWN_SLABS + NEIGHBOURS + 1u) /* the last stays free */
#define CANARY         0xa5
#define REQUESTS       4u
#define ASYNC_BYTES    65536u
#define ASYNC_MAX      16384u
#define FD             1000000 /* never opened */
#define PREFIX_BYTES   128u
#define FUZZ_TICKET    "0123456789abcdef0123456789abcdef"
#define MUTATION_BYTES 600u

/* The first byte. */
enum {
	CHOOSE_ASYNC = 0x01,
	CHOOSE_PREFIX = 0x02, /* the handshake is said for the input */
	CHOOSE_EXPORT_NAME = 0x04,
	CHOOSE_NO_ZEROES = 0x08,
	CHOOSE_SIZES_SHIFT = 4, /* two bits: of pieces */
	CHOOSE_END_SHIFT = 6,   /* two bits: how the stream ends */
};

enum { END_CLOSED, END_RESET, END_SILENCE, END_INTERRUPTED };

/* What the client says and how the kernel cuts it. */
struct stream {
	uint8_t prefix[PREFIX_BYTES];
	size_t prefix_at, prefix_left;
	const uint8_t *at;
	size_t left;
	uint32_t random; /* of receives */
	uint32_t send_random;
	unsigned sizes, end;
	unsigned silences; /* said already */
};

struct async {
	struct iswi_nbd_request requests[REQUESTS];
	struct iswi_nbd_request *free, *pending;
	unsigned free_count, pending_count;
	pthread_mutex_t lock;
	pthread_cond_t given;
	char bytes[ASYNC_BYTES];
};

static struct {
	isw_store *store;
	struct iswi_lease *lease;
	struct iswi_nbd_server *async_server;
	struct async async;
	struct stream stream;
} fuzz;

/* The waiting thread of an asynchronous connection waits for real. */
static _Thread_local bool is_fuzz_thread;

int LLVMFuzzerInitialize(int *argc, char ***argv);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t size_max);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t size_max, unsigned seed);

#define MUST(condition)                                                                            \
	do {                                                                                       \
		if (!(condition))                                                                  \
			abort();                                                                   \
	} while (0)

static uint32_t next_random(uint32_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 17;
	*state ^= *state << 5;
	return *state;
}

/* ---- the kernel's part */

static bool overlaps(const void *memory, size_t bytes, const struct iovec *iov)
{
	uintptr_t a = (uintptr_t)memory, b = (uintptr_t)iov->iov_base;

	return a < b + iov->iov_len && b < a + bytes;
}

/* Of the slabs only the client's own may be used, and not across their ends. */
static void check_iov(const struct iovec *iov)
{
	for (unsigned i = 0; i < SLABS; i++) {
		const struct iswi_store_slab *slab = &fuzz.store->slabs[i];
		uintptr_t base = (uintptr_t)slab->mem.base, from = (uintptr_t)iov->iov_base;
		bool own = false;

		for (unsigned s = 0; s < OWN_SLABS; s++)
			own |= fuzz.lease->slots[s].slab == i;
		if (iov->iov_len == 0 || !overlaps(slab->mem.base, SLAB_BYTES, iov))
			continue;
		MUST(own);
		MUST(from >= base && iov->iov_len <= SLAB_BYTES - (from - base));
	}
}

static size_t piece(uint32_t *random, size_t bytes)
{
	static const uint32_t sizes[] = {UINT32_MAX, 1, 64, 8192};
	uint32_t size = sizes[fuzz.stream.sizes];

	if (size != UINT32_MAX && size != 1)
		size = 1 + next_random(random) % size;
	return ISWI_MIN(bytes, (size_t)size);
}

static size_t say(uint8_t *to, size_t bytes)
{
	struct stream *stream = &fuzz.stream;
	size_t from_prefix = ISWI_MIN(bytes, stream->prefix_left);
	size_t from_input = ISWI_MIN(bytes - from_prefix, stream->left);

	memcpy(to, stream->prefix + stream->prefix_at, from_prefix);
	memcpy(to + from_prefix, stream->at, from_input);
	stream->prefix_at += from_prefix;
	stream->prefix_left -= from_prefix;
	stream->at += from_input;
	stream->left -= from_input;
	return from_prefix + from_input;
}

static ssize_t say_end(void)
{
	struct stream *stream = &fuzz.stream;

	if (stream->end == END_RESET) {
		errno = ECONNRESET;
		return -1;
	}
	if (stream->end == END_CLOSED || stream->silences++ > 0)
		return 0;
	errno = stream->end == END_SILENCE ? EAGAIN : EINTR;
	return -1;
}

ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags);
ssize_t __wrap_recvmsg(int fd, struct msghdr *message, int flags)
{
	size_t wanted = 0, done = 0;

	MUST(fd == FD);
	for (size_t i = 0; i < message->msg_iovlen; i++) {
		check_iov(&message->msg_iov[i]);
		wanted += message->msg_iov[i].iov_len;
	}
	MUST(wanted > 0); /* a receive of nothing looks like the end */
	if ((flags & MSG_DONTWAIT) != 0 && next_random(&fuzz.stream.random) % 8 == 0) {
		errno = EAGAIN;
		return -1;
	}
	wanted = piece(&fuzz.stream.random, wanted);
	for (size_t i = 0; i < message->msg_iovlen && done < wanted; i++) {
		size_t bytes = ISWI_MIN(wanted - done, message->msg_iov[i].iov_len);
		size_t said = say(message->msg_iov[i].iov_base, bytes);

		done += said;
		if (said < bytes)
			break;
	}
	return done > 0 ? (ssize_t)done : say_end();
}

ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags);
ssize_t __wrap_sendmsg(int fd, const struct msghdr *message, int flags)
{
	static uint8_t sink[ASYNC_MAX];
	size_t wanted = 0, done = 0;

	MUST(fd == FD);
	for (size_t i = 0; i < message->msg_iovlen; i++) {
		check_iov(&message->msg_iov[i]);
		wanted += message->msg_iov[i].iov_len;
	}
	if (fuzz.stream.sizes != 0 && next_random(&fuzz.stream.send_random) % 16 == 0) {
		errno = (flags & MSG_DONTWAIT) != 0 ? EAGAIN : EINTR;
		if (next_random(&fuzz.stream.send_random) % 16 == 0)
			errno = EPIPE;
		return -1;
	}
	wanted = piece(&fuzz.stream.send_random, wanted);
	for (size_t i = 0; i < message->msg_iovlen && done < wanted; i++) {
		const uint8_t *from = message->msg_iov[i].iov_base;
		size_t bytes = ISWI_MIN(wanted - done, message->msg_iov[i].iov_len);

		MUST(bytes <= sizeof(sink));
		memcpy(sink, from, bytes); /* all of it must be readable */
		done += bytes;
	}
	return (ssize_t)done;
}

int __wrap_setsockopt(int fd, int level, int option, const void *value, socklen_t bytes);
int __wrap_setsockopt(int fd, int level, int option, const void *value, socklen_t bytes)
{
	(void)fd, (void)level, (void)option, (void)value, (void)bytes;
	return 0;
}

int __wrap_shutdown(int fd, int how);
int __wrap_shutdown(int fd, int how)
{
	(void)fd, (void)how;
	return 0;
}

/* Only who waits to send: it may go on, or, rarely, has waited too long. */
int __wrap_poll(struct pollfd *pollfds, nfds_t count, int timeout_ms);
int __wrap_poll(struct pollfd *pollfds, nfds_t count, int timeout_ms)
{
	(void)count, (void)timeout_ms;
	pollfds[0].revents = POLLOUT;
	return next_random(&fuzz.stream.send_random) % 64 != 0;
}

/* ---- the asynchronous export: requests end at once, or when nobody could go on otherwise */

static void complete_pending(void)
{
	struct async *async = &fuzz.async;

	while (async->pending != NULL) {
		struct iswi_nbd_request *request = async->pending;

		async->pending = request->next;
		async->pending_count--;
		iswi_nbd_complete(request, request->offset % 5 == 4 ? -EIO : 0);
	}
}

int __real_pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex);
int __wrap_pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex);
int __wrap_pthread_cond_wait(pthread_cond_t *cond, pthread_mutex_t *mutex)
{
	if (!is_fuzz_thread || fuzz.async.pending == NULL)
		return __real_pthread_cond_wait(cond, mutex);
	pthread_mutex_unlock(mutex);
	complete_pending();
	pthread_mutex_lock(mutex);
	return 0; /* as if woken for nothing */
}

static int async_open(void *ctx, const char *name, size_t name_bytes, struct iswi_nbd_conn *conn,
		      struct iswi_nbd_export *export_out)
{
	(void)ctx, (void)conn;
	if (name_bytes != 0) {
		volatile char last = name[name_bytes - 1]; /* the name is all there */

		(void)last;
		return -ENOENT;
	}
	export_out->size_bytes = ASYNC_BYTES;
	export_out->block_bytes_min = 512;
	export_out->block_bytes_preferred = ISW_PAGE_BYTES;
	export_out->block_bytes_max = ASYNC_MAX;
	return 0;
}

static void async_close(void *ctx, struct iswi_nbd_export *export, struct iswi_nbd_conn *conn)
{
	(void)ctx, (void)export, (void)conn;
	MUST(fuzz.async.pending == NULL && fuzz.async.free_count == REQUESTS);
}

static struct iswi_nbd_request *async_take(struct iswi_nbd_export *export)
{
	struct async *async = &fuzz.async;
	struct iswi_nbd_request *request;

	(void)export;
	if (async->free_count == 0)
		complete_pending();
	pthread_mutex_lock(&async->lock);
	while (async->free == NULL) /* the waiting thread has them */
		pthread_cond_wait(&async->given, &async->lock);
	request = async->free;
	async->free = request->next;
	async->free_count--;
	pthread_mutex_unlock(&async->lock);
	return request;
}

static void async_give(struct iswi_nbd_export *export, struct iswi_nbd_request *request)
{
	struct async *async = &fuzz.async;

	(void)export;
	pthread_mutex_lock(&async->lock);
	request->next = async->free;
	async->free = request;
	async->free_count++;
	MUST(async->free_count <= REQUESTS);
	pthread_cond_signal(&async->given);
	pthread_mutex_unlock(&async->lock);
}

static void async_submit(struct iswi_nbd_export *export, struct iswi_nbd_request *request)
{
	struct async *async = &fuzz.async;
	char *at = async->bytes;

	(void)export;
	if (request->command != NBD_CMD_FLUSH) { /* which has no range */
		MUST(request->length > 0 && request->length % 512 == 0);
		MUST(request->offset <= ASYNC_BYTES &&
		     request->length <= ASYNC_BYTES - request->offset);
		at += request->offset;
	}
	switch (request->command) {
	case NBD_CMD_READ:
		MUST(request->length <= ASYNC_MAX);
		memcpy(request->data, at, request->length);
		break;
	case NBD_CMD_WRITE:
		MUST(request->length <= ASYNC_MAX);
		memcpy(at, request->data, request->length);
		break;
	case NBD_CMD_TRIM:
	case NBD_CMD_WRITE_ZEROES:
		memset(at, 0, request->length);
		break;
	default:
		MUST(request->command == NBD_CMD_FLUSH);
	}
	if (next_random(&fuzz.stream.random) % 3 == 0) {
		iswi_nbd_complete(request, 0);
		return;
	}
	request->next = async->pending; /* the other way round than they came */
	async->pending = request;
	async->pending_count++;
	if (next_random(&fuzz.stream.random) % 4 == 0)
		complete_pending();
}

static const struct iswi_nbd_backend async_backend = {
	.listed = "",
	.open = async_open,
	.close = async_close,
	.take = async_take,
	.submit = async_submit,
	.give = async_give,
};

/* ---- set-up */

static struct iswi_lease *make_lease(uint32_t slots, uint32_t mapped)
{
	const struct isw_ticket_config any_number = {.uses = UINT32_MAX};
	char ticket[ISW_TICKET_TEXT_BYTES];
	uint64_t lease, generation;
	uint32_t slot;

	MUST(isw_store_lease_create(fuzz.store, slots, &lease, NULL) == 0);
	MUST(isw_store_ticket(fuzz.store, lease, &any_number, ticket) == 0);
	for (uint32_t i = 0; i < mapped; i++)
		MUST(isw_store_map(fuzz.store, lease, 0, &slot, &generation) == 0);
	return iswi_lease_find(fuzz.store, lease);
}

static void set_up_store(void)
{
	const struct isw_store_config config = {
		.slab_bytes = SLAB_BYTES,
		.slabs_max = SLABS,
		.leases_max = 2,
		.connections_max = 1,
		.connections_per_lease_max = 1,
		.handshake_ms_max = 60000,
		.send_ms_max = 60000,
	};
	struct iswi_lease *neighbour;

	MUST(isw_store_create(&config, &fuzz.store, NULL) == 0);
	for (unsigned i = 0; i < SLABS; i++)
		MUST(isw_store_preallocate(fuzz.store, NULL) == 0);
	neighbour = make_lease(NEIGHBOURS, NEIGHBOURS);
	fuzz.lease = make_lease(OWN_SLABS + 1, OWN_SLABS);
	for (unsigned i = 0; i < NEIGHBOURS; i++)
		memset(neighbour->slots[i].memory, CANARY, SLAB_BYTES);
	/* A saved input must work again in another process. */
	memcpy(fuzz.lease->tickets[0].text, FUZZ_TICKET, ISW_TICKET_TEXT_BYTES);
}

static void set_up_async(void)
{
	const struct iswi_nbd_server_config config = {
		.backend = &async_backend,
		.connections_max = 1,
		.handshake_ms_max = 60000,
		.send_ms_max = 60000,
	};
	struct async *async = &fuzz.async;

	MUST(iswi_nbd_server_create(&config, &fuzz.async_server, NULL) == 0);
	MUST(pthread_mutex_init(&async->lock, NULL) == 0);
	MUST(pthread_cond_init(&async->given, NULL) == 0);
	for (unsigned i = 0; i < REQUESTS; i++) {
		async->requests[i].data = malloc(ASYNC_MAX);
		MUST(async->requests[i].data != NULL);
		memset(async->requests[i].data, 0, ASYNC_MAX);
		async_give(NULL, &async->requests[i]);
	}
}

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
	(void)argc, (void)argv;
	is_fuzz_thread = true;
	set_up_store();
	set_up_async();
	return 0;
}

/* ---- one input */

static void put_prefix(struct stream *stream, unsigned choices)
{
	const char *ticket = (choices & CHOOSE_ASYNC) != 0 ? "" : FUZZ_TICKET;
	uint32_t ticket_bytes = (uint32_t)strlen(ticket);
	uint8_t *at = stream->prefix;

	nbd_put32(at, NBD_FLAG_FIXED_NEWSTYLE |
			      ((choices & CHOOSE_NO_ZEROES) != 0 ? NBD_FLAG_NO_ZEROES : 0));
	at += 4;
	if ((choices & CHOOSE_EXPORT_NAME) != 0) {
		nbd_put_option(at, NBD_OPT_EXPORT_NAME, ticket_bytes);
		at += NBD_OPTION_HEADER_BYTES;
		memcpy(at, ticket, ticket_bytes);
		at += ticket_bytes;
	} else {
		nbd_put_option(at, NBD_OPT_GO, 6 + ticket_bytes);
		at += NBD_OPTION_HEADER_BYTES;
		nbd_put32(at, ticket_bytes);
		memcpy(at + 4, ticket, ticket_bytes);
		at += 4 + ticket_bytes;
		nbd_put16(at, 0);
		at += 2;
	}
	stream->prefix_left = (size_t)(at - stream->prefix);
}

static void check_after(void)
{
	static uint8_t canaries[SLAB_BYTES];
	static const uint8_t zeros[SLAB_BYTES];

	memset(canaries, CANARY, sizeof(canaries));
	for (unsigned i = 0; i < fuzz.lease->slots_max; i++)
		MUST(atomic_load(&fuzz.lease->slots[i].refs) == 0);
	MUST(fuzz.lease->conn_count == 0);
	MUST(fuzz.async.free_count == REQUESTS && fuzz.async.pending_count == 0);
	for (unsigned i = 0; i < SLABS; i++) {
		const struct iswi_store_slab *slab = &fuzz.store->slabs[i];
		bool own = false;

		for (unsigned s = 0; s < OWN_SLABS; s++)
			own |= fuzz.lease->slots[s].slab == i;
		if (!own)
			MUST(memcmp(slab->mem.base,
				    slab->state == ISWI_SLAB_MAPPED ? canaries : zeros,
				    SLAB_BYTES) == 0);
	}
}

/* flags: of the turns, as a thread that may wait gives them, or a worker. */
static int serve(struct iswi_nbd_conn *conn, int flags)
{
	int result;

	if (conn->server == fuzz.async_server)
		return iswi_nbd_async_serve(conn);
	iswi_nbd_memory_begin(conn);
	do
		result = iswi_nbd_memory_turn(conn, flags);
	while (result > 0);
	iswi_nbd_memory_end(conn);
	return result;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	struct stream *stream = &fuzz.stream;
	struct iswi_nbd_conn *conn;
	struct iswi_nbd_server *server;

	if (size < 2)
		return -1;
	memset(stream, 0, sizeof(*stream));
	stream->sizes = data[0] >> CHOOSE_SIZES_SHIFT & 3;
	stream->end = data[0] >> CHOOSE_END_SHIFT & 3;
	stream->random = stream->send_random = 0x9e3779b9u ^ data[1];
	stream->at = data + 2;
	stream->left = size - 2;
	if ((data[0] & CHOOSE_PREFIX) != 0)
		put_prefix(stream, data[0]);
	server = (data[0] & CHOOSE_ASYNC) != 0 ? fuzz.async_server : fuzz.store->server;
	/* Anew each time: ASan then knows where it ends and what was never written. */
	conn = malloc(sizeof(*conn));
	MUST(conn != NULL);
	iswi_nbd_conn_init(conn, server, FD);
	if (iswi_nbd_conn_open(conn) == 0)
		iswi_nbd_conn_close(conn, serve(conn, data[1] % 2 == 0 ? 0 : MSG_DONTWAIT));
	free(conn);
	check_after();
	return 0;
}

/* ---- mutations that no chance would bring about: whole requests and options */

static uint64_t some_number(uint32_t *random)
{
	static const uint64_t edges[] = {0,
					 1,
					 512,
					 4096,
					 SLAB_BYTES - 1,
					 SLAB_BYTES,
					 OWN_SLABS * SLAB_BYTES,
					 (OWN_SLABS + 1) * SLAB_BYTES,
					 ASYNC_BYTES,
					 1u << 25,
					 UINT32_MAX,
					 1ull << 63,
					 UINT64_MAX - 4095};

	if (next_random(random) % 4 == 0)
		return (uint64_t)next_random(random) << 32 | next_random(random);
	return edges[next_random(random) % ISWI_ARRAY_LEN(edges)] + next_random(random) % 3 - 1;
}

/* Returns its bytes: at most MUTATION_BYTES. */
static size_t make_request(uint8_t *to, uint32_t *random)
{
	struct nbd_request request = {
		.flags = (uint16_t)(next_random(random) % 8 == 0 ? next_random(random) : 0),
		.command = (uint16_t)(next_random(random) % 8),
		.cookie = next_random(random),
		.offset = next_random(random) % 2 == 0 ? next_random(random) % 128 * 512
						       : some_number(random),
		.length = next_random(random) % 2 == 0 ? 512 : (uint32_t)some_number(random),
	};
	size_t payload = request.command == NBD_CMD_WRITE ? request.length : 0;

	nbd_put_request(to, &request);
	payload = ISWI_MIN(payload, MUTATION_BYTES - NBD_REQUEST_BYTES);
	memset(to + NBD_REQUEST_BYTES, (int)next_random(random), payload);
	return NBD_REQUEST_BYTES + payload;
}

static size_t make_option(uint8_t *to, uint32_t *random)
{
	uint32_t name_bytes = next_random(random) % 2 == 0 ? ISWI_TICKET_BYTES : 0;
	uint32_t number = next_random(random) % 12, length = 6 + name_bytes;

	if (next_random(random) % 4 == 0)
		length = (uint32_t)some_number(random);
	nbd_put_option(to, number, length);
	nbd_put32(to + 16, name_bytes);
	memcpy(to + 20, FUZZ_TICKET, name_bytes);
	nbd_put16(to + 20 + name_bytes, 0);
	return NBD_OPTION_HEADER_BYTES + 6 + name_bytes;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t size_max, unsigned seed)
{
	uint32_t random = seed | 1;
	uint8_t item[MUTATION_BYTES];
	size_t bytes, at, step;
	bool request;

	if (size < 2 || next_random(&random) % 2 == 0)
		return LLVMFuzzerMutate(data, size, size_max);
	request = (data[0] & CHOOSE_PREFIX) != 0;
	bytes = request ? make_request(item, &random) : make_option(item, &random);
	/* Between headers of the same sort, mostly; or at the end. */
	step = request ? NBD_REQUEST_BYTES : NBD_OPTION_HEADER_BYTES;
	at = 2 + (request ? 0 : 4);
	at += next_random(&random) % 4 * step;
	if (at > size || next_random(&random) % 2 == 0)
		at = size;
	if (bytes > size_max - at)
		return LLVMFuzzerMutate(data, size, size_max);
	if (next_random(&random) % 2 == 0 && size + bytes <= size_max) {
		memmove(data + at + bytes, data + at, size - at);
		size += bytes;
	}
	memcpy(data + at, item, bytes);
	return ISWI_MAX(size, at + bytes);
}
