// SPDX-License-Identifier: Apache-2.0
#include "frontend/frontend.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "frontend/far.h"
#include "frontend/fuse_frontend.h"
#include "frontend/nbd_socket.h"
#include "frontend/ublk.h"
#include "util/util.h"

static const struct iswi_frontend_ops *const all[] = {
	&iswi_ublk_ops, &iswi_nbd_ops, &iswi_fuse_ops, &iswi_nbd_socket_ops, &iswi_far_ops,
};

const char *isw_frontend_kind(uint32_t index, const char **missing_out)
{
	if (index >= ISWI_ARRAY_LEN(all))
		return NULL;
	*missing_out = all[index]->missing;
	return all[index]->name;
}

/* NULL with `code_out` and `error` set: there is none of that name, or not in this build. */
static const struct iswi_frontend_ops *find(const char *kind, int *code_out,
					    struct isw_error *error)
{
	for (size_t i = 0; i < ISWI_ARRAY_LEN(all); i++) {
		if (strcmp(all[i]->name, kind) != 0)
			continue;
		if (all[i]->missing == NULL)
			return all[i];
		*code_out = iswi_error(error, -ENOSYS, "%s", all[i]->missing);
		return NULL;
	}
	*code_out = iswi_error(error, -EINVAL, "there is no front end %s", kind);
	return NULL;
}

static int lacks(const struct iswi_frontend_ops *ops, const char *what, struct isw_error *error)
{
	return iswi_error(error, -EINVAL, "the front end %s %s", ops->name, what);
}

int isw_frontend_start(isw_engine *engine, const char *kind,
		       const struct isw_frontend_config *config, isw_frontend **frontend_out,
		       struct isw_error *error)
{
	int code = 0;
	const struct iswi_frontend_ops *ops = find(kind, &code, error);

	*frontend_out = NULL;
	return ops == NULL ? code : ops->start(engine, config, frontend_out, error);
}

int isw_frontend_prepare(isw_engine *engine, const char *kind,
			 const struct isw_frontend_config *config, isw_frontend **frontend_out,
			 struct isw_error *error)
{
	int code = 0;
	const struct iswi_frontend_ops *ops = find(kind, &code, error);

	*frontend_out = NULL;
	if (ops == NULL)
		return code;
	if (ops->prepare == NULL)
		return lacks(ops, "needs no preparation", error);
	return ops->prepare(engine, config, frontend_out, error);
}

int isw_frontend_handover(isw_frontend *frontend, int32_t *fd_out, void *note_out,
			  struct isw_error *error)
{
	*fd_out = -1;
	if (frontend->ops->handover == NULL)
		return lacks(frontend->ops, "hands nothing over", error);
	return frontend->ops->handover(frontend, fd_out, note_out, error);
}

int isw_frontend_serve(isw_frontend *frontend, int32_t fd, struct isw_error *error)
{
	if (frontend->ops->serve == NULL)
		return lacks(frontend->ops, "takes no connections", error);
	return frontend->ops->serve(frontend, fd, error);
}

int isw_frontend_take_over(isw_frontend *frontend, uint32_t wait_ms_max, struct isw_error *error)
{
	if (frontend->ops->take_over == NULL)
		return lacks(frontend->ops, "takes no device over", error);
	return frontend->ops->take_over(frontend, wait_ms_max, error);
}

int isw_frontend_rings(isw_frontend *frontend, int32_t *fds_out, uint32_t max)
{
	return frontend->ops->rings == NULL ? 0 : frontend->ops->rings(frontend, fds_out, max);
}

void isw_frontend_info(isw_frontend *frontend, struct isw_frontend_info *info_out)
{
	*info_out = (struct isw_frontend_info){0};
	frontend->ops->info(frontend, info_out);
}

void isw_frontend_destroy(isw_frontend *frontend)
{
	if (frontend != NULL)
		frontend->ops->destroy(frontend);
}
