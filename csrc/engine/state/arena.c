/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The arena and the file behind it. What the header says never changes and has a checksum; of the
 * rest only each page's bytes have one: bits, descriptors and places change all the time, each by
 * one store (R9 to R12), so what can be said of them is whether they are possible (recover.c).
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/state/arena.h"
#include "engine/state/page.h"
#include "engine/state/place.h"
#include "engine/state/seal.h"

#define ARENA_MAGIC   0x314152574b415049ull
#define ARENA_VERSION 3u

uint64_t iswi_lay_out(uint64_t *end, uint64_t bytes)
{
	uint64_t offset = *end;

	*end = (offset + bytes + ISW_PAGE_BYTES - 1) / ISW_PAGE_BYTES * ISW_PAGE_BYTES;
	return offset;
}

static uint32_t header_crc(const struct iswi_arena_header *header)
{
	struct iswi_arena_header copy;

	memcpy(&copy, header, offsetof(struct iswi_arena_header, phase));
	copy.header_crc = 0;
	return iswi_crc32c(&copy, offsetof(struct iswi_arena_header, phase));
}

/* Of this boot of the host: a file that outlived it is of another one. */
static int read_boot_id(char *out, size_t bytes)
{
	int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC), code = 0;
	ssize_t n;

	if (fd < 0)
		return -errno;
	memset(out, 0, bytes);
	n = read(fd, out, bytes - 1);
	if (n <= 0)
		code = n < 0 ? -errno : -EIO;
	close(fd);
	out[strcspn(out, "\n")] = 0;
	return code;
}

static int plan_arena(const struct isw_engine *e, struct iswi_arena_header *header,
		      struct isw_error *error)
{
	uint64_t groups = (e->pages + ISWI_GROUP_PAGES - 1) / ISWI_GROUP_PAGES;
	uint64_t end = 0;
	int code;

	iswi_lay_out(&end, sizeof(*header));
	memset(header, 0, sizeof(*header));
	header->magic = ARENA_MAGIC;
	header->version = ARENA_VERSION;
	header->staging_pages = e->config.staging_pages;
	header->remotes_max = e->config.remotes_max;
	header->no_backup = !e->has_backup;
	header->sealed = iswi_sealed(e);
	header->size_bytes = e->config.size_bytes;
	header->slab_bytes = e->config.slab_bytes;
	header->slabs_offset = iswi_lay_out(&end, e->slabs_count * sizeof(struct iswi_slab));
	header->remote_valid_offset = iswi_lay_out(&end, groups * sizeof(uint32_t));
	header->at_place_offset = iswi_lay_out(&end, groups * sizeof(uint32_t));
	header->backup_current_offset = iswi_lay_out(&end, groups * sizeof(uint32_t));
	header->seals_offset = iswi_lay_out(&end, e->pages * iswi_seal_bytes(e));
	header->records_offset =
		iswi_lay_out(&end, e->config.remotes_max * sizeof(struct iswi_record));
	header->slots_offset =
		iswi_lay_out(&end, e->config.staging_pages * sizeof(struct iswi_descriptor));
	header->staging_offset =
		iswi_lay_out(&end, (uint64_t)e->config.staging_pages * ISW_PAGE_BYTES);
	header->bytes = end;
	code = read_boot_id(header->boot_id, sizeof(header->boot_id));
	if (code)
		return iswi_error(error, code,
				  "cannot tell this boot of the host from others: "
				  "/proc/sys/kernel/random/boot_id: %s",
				  strerror(-code));
	header->header_crc = header_crc(header);
	return 0;
}

/* ------------------------------------------------------------------------- looking */

static bool is_zero(const void *data, size_t bytes)
{
	const unsigned char *at = data;

	return !at[0] && !memcmp(at, at + 1, bytes - 1);
}

static int check_header(const struct iswi_arena_header *h, uint64_t file_bytes,
			struct isw_error *error)
{
	char boot_id[sizeof(h->boot_id)];
	int code;

	if (is_zero(h, sizeof(*h)))
		return iswi_error(error, -ENODATA,
				  "the state file is all zeros: its device has never served; start "
				  "the device again");
	if (h->magic != ARENA_MAGIC)
		return iswi_error(error, -EBADMSG,
				  "this is no state file of a device, or its beginning is damaged; "
				  "nothing was changed");
	if (h->version != ARENA_VERSION)
		return iswi_error(error, -EPROTONOSUPPORT,
				  "the state file has layout version %u and this program knows %u; "
				  "use the program that made it",
				  h->version, ARENA_VERSION);
	if (h->header_crc != header_crc(h))
		return iswi_error(error, -EBADMSG,
				  "the state file is damaged: its header does not match its "
				  "checksum; nothing was changed");
	code = read_boot_id(boot_id, sizeof(boot_id));
	if (!code && memcmp(boot_id, h->boot_id, sizeof(boot_id)))
		code = -ESTALE;
	if (code)
		return iswi_error(error, code,
				  "the state file is from before this host was booted, and so was "
				  "the kernel's device; start the device again");
	if (file_bytes < h->bytes)
		return iswi_error(error, -EBADMSG,
				  "the state file is damaged: it was cut short to %llu of %llu "
				  "bytes; nothing was changed",
				  (unsigned long long)file_bytes, (unsigned long long)h->bytes);
	return 0;
}

static int read_header(int fd, struct iswi_arena_header *header, uint64_t *file_bytes_out,
		       struct isw_error *error)
{
	struct stat st;
	ssize_t n;

	memset(header, 0, sizeof(*header));
	if (fstat(fd, &st) < 0 || (n = pread(fd, header, sizeof(*header), 0)) < 0)
		return iswi_error(error, -errno, "cannot read the state file: %s", strerror(errno));
	*file_bytes_out = (uint64_t)st.st_size;
	if (!n)
		return iswi_error(error, -ENODATA,
				  "the state file is empty: its device has never served; start "
				  "the device again");
	if ((size_t)n < sizeof(*header))
		return iswi_error(error, -EBADMSG,
				  "the state file is damaged: it was cut short to %lld bytes",
				  (long long)n);
	return check_header(header, *file_bytes_out, error);
}

int isw_state_read(int32_t fd, struct isw_state_info *info_out, struct isw_error *error)
{
	struct iswi_arena_header h;
	uint64_t file_bytes;
	int code = read_header(fd, &h, &file_bytes, error);

	if (code)
		return code;
	*info_out = (struct isw_state_info){
		.size_bytes = h.size_bytes,
		.slab_bytes = h.slab_bytes,
		.file_bytes = file_bytes,
		.staging_pages = h.staging_pages,
		.remotes_max = h.remotes_max,
		.no_backup = h.no_backup,
		.version = h.version,
		.ready = iswi_kept32(&h.phase) == ISWI_ARENA_READY,
	};
	return 0;
}

/* Whole, and of a device such as the one that this engine was made for? */
static int check_same(const struct iswi_arena_header *h, const struct iswi_arena_header *planned,
		      struct isw_error *error)
{
	const struct {
		const char *what;
		uint64_t is, wanted;
	} fields[] = {
		{"bytes of device", h->size_bytes, planned->size_bytes},
		{"bytes a slab", h->slab_bytes, planned->slab_bytes},
		{"staging buffers", h->staging_pages, planned->staging_pages},
		{"donors at most", h->remotes_max, planned->remotes_max},
		{"backups", !h->no_backup, !planned->no_backup},
		{"keys for its pages", h->sealed, planned->sealed},
	};

	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(fields); i++)
		if (fields[i].is != fields[i].wanted)
			return iswi_error(error, -EINVAL,
					  "the state file is of another device: it has %llu %s, "
					  "not %llu; a successor must be made like the device",
					  (unsigned long long)fields[i].is, fields[i].what,
					  (unsigned long long)fields[i].wanted);
	if (memcmp(h, planned, offsetof(struct iswi_arena_header, phase)))
		return iswi_error(error, -EPROTONOSUPPORT,
				  "the state file has another layout than this program's; use the "
				  "program that made it");
	return 0;
}

int iswi_arena_check(const struct isw_engine *e, struct isw_error *error)
{
	struct iswi_arena_header planned, header = {0};
	int code = plan_arena(e, &planned, error);
	struct stat st;

	if (code)
		return code;
	/* Not through the mapping: of a file that was cut short that would be a SIGBUS. */
	if (e->state_lock_fd < 0) {
		header = *e->arena;
		st.st_size = (off_t)header.bytes;
	} else if (fstat(e->state_lock_fd, &st) < 0 ||
		   pread(e->state_lock_fd, &header, sizeof(header), 0) < 0) {
		return iswi_error(error, -errno, "cannot read the state file: %s", strerror(errno));
	}
	code = check_header(&header, (uint64_t)st.st_size, error);
	if (!code)
		code = check_same(&header, &planned, error);
	if (!code && iswi_kept32(&header.phase) != ISWI_ARENA_READY)
		code = iswi_error(error, -ENODATA,
				  "the state file was never finished: its process ended while it "
				  "was starting; start the device again");
	return code;
}

/* ------------------------------------------------------------------------ ownership */

int iswi_arena_own(struct isw_engine *e, uint32_t wait_ms_max, struct isw_error *error)
{
	int code;

	if (e->state_lock_fd < 0)
		return 0;
	code = iswi_flock_wait(e->state_lock_fd, wait_ms_max);
	if (code)
		return iswi_error(error, code,
				  "the state file belongs to another device process that is alive");
	return 0;
}

void iswi_arena_disown(struct isw_engine *e)
{
	if (e->state_lock_fd >= 0)
		flock(e->state_lock_fd, LOCK_UN);
}

/*
 * An open file of our own, because its lock is to end with this process: who handed the state file
 * to us may hold the one we were given, and give it to others.
 */
static int open_state(struct isw_engine *e, struct isw_error *error)
{
	char path[64];
	struct stat st;

	if (fstat(e->config.state_fd, &st) < 0)
		return iswi_error(error, -errno, "cannot look at the state file: %s",
				  strerror(errno));
	if (!S_ISREG(st.st_mode))
		return iswi_error(error, -EINVAL, "the state file is not a regular file");
	snprintf(path, sizeof(path), "/proc/self/fd/%d", e->config.state_fd);
	e->state_lock_fd = open(path, O_RDWR | O_CLOEXEC);
	if (e->state_lock_fd < 0)
		return iswi_error(error, -errno, "cannot open the state file for writing: %s",
				  strerror(errno));
	return 0;
}

/* -------------------------------------------------------------------------- mapping */

static int no_memory(uint64_t bytes, int code, struct isw_error *error)
{
	return iswi_error(error, code,
			  "cannot get %llu MiB of memory for the device's tables and staging "
			  "buffers: %s; use a smaller device or less staging",
			  (unsigned long long)(bytes >> 20), strerror(-code));
}

/*
 * Empty, of that size, and every block of it there: a file system that is full must say so now, not
 * with a signal at the first page.
 */
static int claim_file(int fd, uint64_t bytes, struct isw_error *error)
{
	int code;

	if (!ftruncate(fd, 0) && !ftruncate(fd, (off_t)bytes) && !fallocate(fd, 0, 0, (off_t)bytes))
		return 0;
	code = -errno;
	if (ftruncate(fd, 0) < 0)
		code = -errno;
	return no_memory(bytes, code, error);
}

static void use_arena(struct isw_engine *e, unsigned char *base,
		      const struct iswi_arena_header *header)
{
	e->arena = (struct iswi_arena_header *)base;
	e->slabs = (struct iswi_slab *)(base + header->slabs_offset);
	e->remote_valid = (atomic_uint *)(base + header->remote_valid_offset);
	e->at_place = (atomic_uint *)(base + header->at_place_offset);
	e->backup_current = (atomic_uint *)(base + header->backup_current_offset);
	if (iswi_sealed(e))
		e->seals = (struct iswi_kept_seal *)(base + header->seals_offset);
	else
		e->crc = (atomic_uint *)(base + header->seals_offset);
	e->records = (struct iswi_record *)(base + header->records_offset);
	e->slots = (struct iswi_descriptor *)(base + header->slots_offset);
	e->staging = base + header->staging_offset;
}

static void begin_arena(struct isw_engine *e, const struct iswi_arena_header *header)
{
	*e->arena = *header; /* UNFINISHED; what is not named below is zeros */
	for (uint32_t i = 0; i < e->config.staging_pages; i++)
		atomic_init(&e->slots[i].page, ISWI_NO_PAGE);
	for (uint32_t i = 0; i < 2 * e->slabs_count; i++)
		atomic_init(&iswi_place(e, i / 2, i % 2)->remote, ISW_NO_REMOTE);
}

/* Makes the file that shall back the arena what it must be before it is mapped. */
static int prepare_file(struct isw_engine *e, const struct iswi_arena_header *planned, int *fd_out,
			struct isw_error *error)
{
	struct iswi_arena_header header;
	uint64_t file_bytes;
	int code;

	if (e->config.state_fd < 0) {
		*fd_out = memfd_create("infiniswap-arena", MFD_CLOEXEC);
		if (*fd_out < 0)
			return iswi_error(error, -errno, "cannot create the device's memory: %s",
					  strerror(errno));
		if (ftruncate(*fd_out, (off_t)planned->bytes) < 0) {
			code = -errno;
			close(*fd_out);
			return no_memory(planned->bytes, code, error);
		}
		return 0;
	}
	code = open_state(e, error);
	*fd_out = e->state_lock_fd;
	if (!code && e->standby) {
		code = read_header(*fd_out, &header, &file_bytes, error);
		return code ? code : check_same(&header, planned, error);
	}
	if (!code)
		code = iswi_arena_own(e, 0, error);
	return code ? code : claim_file(*fd_out, planned->bytes, error);
}

int iswi_arena_map(struct isw_engine *e, struct isw_error *error)
{
	struct iswi_arena_header header;
	unsigned char *base;
	int fd, code;

	code = plan_arena(e, &header, error);
	if (!code)
		code = prepare_file(e, &header, &fd, error);
	if (code)
		return code; /* the caller calls iswi_arena_unmap */
	base = mmap(NULL, header.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
	code = base == MAP_FAILED ? -errno : 0;
	if (fd != e->state_lock_fd)
		close(fd);
	if (code)
		return no_memory(header.bytes, code, error);
	/* A child between fork and exec must not get copies of pages a transfer writes to. */
	madvise(base, header.bytes, MADV_DONTFORK);
	e->arena_bytes = header.bytes;
	use_arena(e, base, &header);
	if (!e->standby)
		begin_arena(e, &header);
	return 0;
}

void iswi_arena_unmap(struct isw_engine *e)
{
	if (e->arena)
		munmap(e->arena, e->arena_bytes);
	if (e->state_lock_fd >= 0)
		close(e->state_lock_fd);
}

void iswi_arena_ready(struct isw_engine *e)
{
	iswi_keep32(&e->arena->phase, ISWI_ARENA_READY);
}
